"""Every setting of a mount, once: its name, type, default, help and group.

A setting is a field of `MountSettings` whose metadata says how it is read from
text and shown again (`Kind`), and what `--help` says about it. Everything that
hands in settings gives text under the field's name: flags (`--cache-size`),
the environment (`FUSEFS_CACHE_SIZE`), a TOML file (`cache-size = "50GiB"`) and
the JSON that the command hands to the daemon. So there is one parser for a
size, and one place that knows a default.

A layer maps names to `Given` texts; `build` takes the layers from the most to
the least binding. What cannot be read is a `SettingsError`, one line that
names where the text came from.

No secret is a setting: credentials come from boto3's own chain.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from fusefs.settings.memory import LEAST
from fusefs.settings.types import (
    DURATION,
    DURATIONS,
    ID,
    LIFETIME,
    MIN_FREE,
    MODE,
    PATH,
    SHARE,
    SILENCE,
    SIZE,
    SOURCE,
    SWITCH,
    URL,
    WORD,
    Addressing,
    ConditionalWrites,
    Conflict,
    Durability,
    ExclusiveCreate,
    Kind,
    LogLevel,
    MinFree,
    ObjectAttributes,
    Passthrough,
    Scrubbing,
    SessionKind,
    Setting,
    Source,
    about,
    at_least,
    choice,
    whole_number,
)
from fusefs.settings.units import MIB


class SettingsError(ValueError):
    """A setting cannot be read; the message is one line for the user."""


def default_cache_dir() -> Path:
    """Where the cache goes: the system's place for root, the user's for others."""
    if os.geteuid() == 0:
        return Path("/var/cache/fusefs")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base).absolute() / "fusefs"


# --- the settings -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSettings:
    """What one mount is to be. Every field but the first two is an option."""

    source: Source
    mountpoint: Path

    endpoint_url: str | None = field(
        default=None,
        metadata=about(URL, "S3", "the S3 endpoint", otherwise="AWS, or its configuration's"),
    )
    region: str | None = field(
        default=None,
        metadata=about(WORD, "S3", "the bucket's region", otherwise="the AWS configuration's"),
    )
    profile: str | None = field(
        default=None,
        metadata=about(WORD, "S3", "the AWS profile", otherwise="AWS_PROFILE, or default"),
    )
    anonymous: bool = field(
        default=False,
        metadata=about(SWITCH, "S3", "send unsigned requests, for public buckets"),
    )
    addressing: Addressing = field(
        default=Addressing.AUTO,
        metadata=about(choice(Addressing), "S3", "the bucket in the URL's path or host name"),
    )
    ca_bundle: Path | None = field(
        default=None,
        metadata=about(PATH, "S3", "certificates to trust (PEM)", otherwise="the system's"),
    )
    requester_pays: bool = field(
        default=False,
        metadata=about(SWITCH, "S3", "agree to pay for the requests"),
    )

    cache_dir: Path = field(
        default_factory=default_cache_dir,
        metadata=about(
            PATH,
            "Cache",
            "where objects are kept",
            otherwise="/var/cache/fusefs for root, else ~/.cache/fusefs",
        ),
    )
    shared_cache: bool = field(
        default=False,
        metadata=about(SWITCH, "Cache", "share objects with mounts under other credentials"),
    )
    cache_size: int | None = field(
        default=None,
        metadata=about(SIZE, "Cache", "the most to keep", otherwise="what the disk allows"),
    )
    scrub: Scrubbing = field(
        default=Scrubbing.ON,
        metadata=about(
            choice(Scrubbing),
            "Cache",
            "compare large cached files with their checksums in the background, after each start",
        ),
    )
    min_free: MinFree = field(
        default=MinFree(percent=10.0),
        metadata=about(MIN_FREE, "Cache", "disk space to leave free"),
    )
    min_free_inodes: MinFree = field(
        default=MinFree(percent=10.0),
        metadata=about(SHARE, "Cache", "the share of the disk's inodes to leave free"),
    )
    revoke_after: float = field(
        default=math.inf,
        metadata=about(LIFETIME, "Cache", "serve nothing cached after S3 refused all for so long"),
    )

    metadata_ttl: float = field(
        default=60.0,
        metadata=about(
            LIFETIME,
            "Metadata",
            "how long listings and attributes are used before they are requested again;"
            " indefinite if nothing ever changes",
        ),
    )
    object_attributes: ObjectAttributes = field(
        default=ObjectAttributes.AUTO,
        metadata=about(
            choice(ObjectAttributes),
            "Metadata",
            "ask objects for modes, owners and times (writable mounts; auto: where some tell them)",
        ),
    )

    read_only: bool = field(
        default=False,
        metadata=about(SWITCH, "Files", "refuse every change"),
    )
    allow_other: bool = field(
        default=False,
        metadata=about(SWITCH, "Files", "let the machine's other users in"),
    )
    uid: int | None = field(
        default=None,
        metadata=about(ID, "Files", "the owner of all files", otherwise="you"),
    )
    gid: int | None = field(
        default=None,
        metadata=about(ID, "Files", "the group of all files", otherwise="yours"),
    )
    file_mode: int = field(
        default=0o644,
        metadata=about(MODE, "Files", "the permissions of files"),
    )
    dir_mode: int = field(
        default=0o755,
        metadata=about(MODE, "Files", "the permissions of directories"),
    )

    durability: Durability = field(
        default=Durability.BUCKET,
        metadata=about(
            choice(Durability), "Writing", "where a file is when fsync and close return"
        ),
    )
    conflict: Conflict = field(
        default=Conflict.OVERWRITE,
        metadata=about(
            choice(Conflict), "Writing", "what to do where somebody else replaced the object"
        ),
    )
    exclusive_create: ExclusiveCreate = field(
        default=ExclusiveCreate.AUTO,
        metadata=about(
            choice(ExclusiveCreate),
            "Writing",
            "put an empty object first for each file created with O_EXCL (auto: where it matters)",
        ),
    )
    conditional_writes: ConditionalWrites = field(
        default=ConditionalWrites.AUTO,
        metadata=about(
            choice(ConditionalWrites),
            "Writing",
            "make changes only over what is known to be there (auto: as the store honours it)",
        ),
    )
    no_delete: bool = field(
        default=False,
        metadata=about(SWITCH, "Writing", "refuse to remove or overwrite what is there"),
    )
    staging_size: int | None = field(
        default=None,
        metadata=about(
            SIZE, "Writing", "the most to hold for upload", otherwise="what the disk allows"
        ),
    )
    flush_interval: float = field(
        default=1.0,
        metadata=about(
            DURATION, "Writing", "how often an open file is uploaded because a copy of it closes"
        ),
    )

    late_request_checks: tuple[float, ...] = field(
        default=(5.0, 15.0, 60.0, 300.0),
        metadata=about(
            DURATIONS,
            "Writing",
            "when a key is looked at again of which a request got no answer",
        ),
    )

    session: SessionKind = field(
        default=SessionKind.AUTO,
        metadata=about(choice(SessionKind), "Kernel", "who speaks FUSE with the kernel"),
    )
    passthrough: Passthrough = field(
        default=Passthrough.AUTO,
        metadata=about(
            choice(Passthrough),
            "Kernel",
            "let the kernel read cached files directly (as root, Linux 6.9 or newer)",
        ),
    )

    user: str | None = field(
        default=None,
        metadata=about(
            WORD,
            "Survival",
            "who the daemon runs as when root mounts",
            otherwise="fusefs or nobody, where they can run it",
        ),
    )
    max_pause: float = field(
        default=300.0,
        metadata=about(
            DURATION, "Survival", "how long a mount without a daemon waits before it fails"
        ),
    )
    hang_timeout: float = field(
        default=30.0,
        metadata=about(
            SILENCE, "Survival", "how long a daemon may be silent before it is replaced"
        ),
    )
    descriptor_store: Path | None = field(
        default=None,
        metadata=about(
            PATH, "Survival", "the socket of a `fusefs keeper` to hold it, too", otherwise="none"
        ),
    )

    max_connections: int = field(
        default=32,
        metadata=about(whole_number(1, 1024), "Limits", "the most requests to S3 at a time"),
    )
    memory_limit: int = field(
        default=256 * MIB,
        metadata=about(at_least(LEAST, SIZE), "Limits", "the daemon's memory (112MiB and more)"),
    )
    retry_time: float = field(
        default=60.0,
        metadata=about(DURATION, "Limits", "how long a failing request is tried again"),
    )

    log_level: LogLevel = field(
        default=LogLevel.INFO,
        metadata=about(choice(LogLevel), "Logging", "the least severe line to log"),
    )
    log_file: Path | None = field(
        default=None,
        metadata=about(
            PATH,
            "Logging",
            "where the log goes",
            otherwise="/var/log/fusefs/ for root, else ~/.local/state/fusefs/; "
            "in the foreground standard error",
        ),
    )
    foreground: bool = field(
        default=False,
        metadata=about(SWITCH, "Logging", "stay in the foreground until the mount ends"),
    )

    def to_json(self) -> str:
        """This as JSON, for `from_json` in another process."""
        return json.dumps(self._as_texts())

    def _as_texts(self) -> dict[str, str]:
        return {
            name: kind.show(value)
            for name, kind in _KINDS.items()
            if (value := getattr(self, name)) is not None
        }

    @classmethod
    def from_json(cls, text: str, *, is_newer: bool = False) -> MountSettings:
        """The settings that `to_json` wrote.

        Where that may have been a newer version's, what is not known here is left out.

        Raises:
            SettingsError: the text is something else.
        """
        try:
            given = dict(json.loads(text))
        except ValueError as error:
            raise SettingsError(f"the settings are no JSON object: {error}") from error
        # An earlier version took less, and its mounts are to go on.
        with suppress(KeyError, ValueError):
            given["memory_limit"] = SIZE.show(max(LEAST, SIZE.read(str(given["memory_limit"]))))
        if is_newer:
            given = {name: value for name, value in given.items() if name in _KINDS}
        return build({name: Given(str(value), name) for name, value in given.items()})

    def changed(self, given: Layer) -> MountSettings:
        """These settings with others in their place.

        Raises:
            SettingsError: one cannot be read, or can't be changed while mounted.
        """
        for name, text in given.items():
            if name in FIXED:
                raise SettingsError(f"{text.origin}: cannot be changed while mounted")
        return build(given, {name: Given(text, name) for name, text in self._as_texts().items()})


def _setting(item: Field[Any]) -> Setting:
    kind, group, help, otherwise = item.metadata["setting"]
    return Setting(item.name, kind, group, help, otherwise or kind.show(item.default))


SETTINGS: tuple[Setting, ...] = tuple(
    _setting(item) for item in fields(MountSettings) if "setting" in item.metadata
)
_KINDS: dict[str, Kind[Any]] = {
    "source": SOURCE,
    "mountpoint": PATH,
    **{setting.name: setting.kind for setting in SETTINGS},
}
_REQUIRED = frozenset(
    item.name
    for item in fields(MountSettings)
    if item.default is MISSING and item.default_factory is MISSING
)


# What the mount itself, its keeper or its state depends on.
FIXED = frozenset((
    "source", "mountpoint", "cache_dir", "shared_cache", "session", "passthrough", "allow_other",
    "read_only", "user", "max_pause", "hang_timeout", "descriptor_store", "foreground", "log_file",
))  # fmt: skip

# --- where settings come from -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Given:
    """The text of one setting, and what to call it when it cannot be read."""

    text: str
    origin: str


Layer = Mapping[str, Given]


def build(*layers: Layer) -> MountSettings:
    """The settings that the layers give together; the first layer wins.

    Raises:
        SettingsError: a text cannot be read, or two settings exclude each other.
    """
    given: dict[str, Given] = {}
    for layer in reversed(layers):
        given.update(layer)
    values: dict[str, Any] = {name: _read(name, text) for name, text in given.items()}
    if missing := _REQUIRED - values.keys():
        raise SettingsError(f"{min(missing)}: missing")
    settings = MountSettings(**values)
    _refuse_contradictions(settings, given)
    return settings


def _read(name: str, given: Given) -> object:
    if name not in _KINDS:
        raise SettingsError(f"{given.origin}: there is no such setting")
    try:
        return _KINDS[name].read(given.text)
    except ValueError as error:
        raise SettingsError(f"{given.origin}: {error}") from None


def _refuse_contradictions(settings: MountSettings, given: Layer) -> None:
    if settings.anonymous and settings.profile:
        raise SettingsError(
            f"{given['profile'].origin}: an anonymous mount uses no profile; drop one of the two"
        )
    for name, path in (("cache_dir", settings.cache_dir), ("log_file", settings.log_file)):
        if path is not None and path.is_relative_to(settings.mountpoint):
            origin = given[name].origin if name in given else name
            raise SettingsError(f"{origin}: {path} is below the mountpoint; choose another place")
