"""The declarations of a mount's settings: name, type, default, help and group of each.

A setting is a field of `MountSettings`, declared by `option`: its type (`SettingType`)
converts it from and to text, its help is the text of `--help`. Settings have four sources,
which all give texts by field name: flags (`--cache-size`), the environment
(`FUSEFS_CACHE_SIZE`), a TOML file (`cache-size = "50GiB"`) and the daemon's standard input.
So each type needs only one parser, and each default is declared in one place.

A `Layer` maps field names to `RawValue` texts. `build` merges layers; the first layer
wins. For a text that cannot be read `build` raises `SettingsError`, whose message names
the origin of the text.

No setting is a secret: botocore finds the credentials.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

from fusefs.linux.mount import MountRequest
from fusefs.settings.memory import LEAST
from fusefs.settings.patterns import PathRules
from fusefs.settings.types import (
    CONNECTIONS,
    DURABILITY,
    DURATION,
    EVERYWHERE_AUTO,
    ID,
    KMS_KEY,
    LIFETIME,
    METADATA_TTL_S,
    MIB,
    MIN_FREE,
    MODE,
    PATH,
    SILENCE,
    SIZE,
    SOURCE,
    STORAGE_CLASS,
    SWITCH,
    TTL,
    URL,
    WORD,
    Acl,
    Addressing,
    AttributeForm,
    Conflict,
    Durability,
    Encryption,
    LogFormat,
    LogLevel,
    MinFree,
    MountSource,
    PassthroughMode,
    SessionKind,
    Setting,
    SettingType,
    at_least,
    choice,
    option,
)


class SettingsError(ValueError):
    """A setting is invalid, missing or contradicts another; the message is a line for the user."""


def default_cache_dir() -> Path:
    """Return the default cache directory: the system's for root, else the user's own."""
    if os.geteuid() == 0:
        return Path("/var/cache/fusefs")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base).absolute() / "fusefs"


# --- the settings -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSettings:
    """All settings of one mount. Every field but the first two is declared by `option`."""

    source: MountSource
    mountpoint: Path

    endpoint_url: str | None = option(
        URL, "S3", "URL of the S3 endpoint", None, otherwise="AWS, or the AWS configuration's"
    )
    region: str | None = option(
        WORD, "S3", "region of the bucket", None, otherwise="the AWS configuration's"
    )
    profile: str | None = option(
        WORD, "S3", "AWS profile to use", None, otherwise="AWS_PROFILE, or default"
    )
    anonymous: bool = option(SWITCH, "S3", "send unsigned requests (for public buckets)", False)
    addressing: Addressing = option(
        choice(Addressing),
        "S3",
        "where the bucket's name goes: into the URL's path, or into its host name (virtual)",
        Addressing.AUTO,
    )
    ca_bundle: Path | None = option(
        PATH, "S3", "file of trusted certificates (PEM)", None, otherwise="the system's"
    )
    requester_pays: bool = option(
        SWITCH, "S3", "agree to pay for the requests (Requester Pays buckets)", False
    )
    fips: bool = option(SWITCH, "S3", "use AWS's endpoints with validated cryptography", False)
    dual_stack: bool = option(SWITCH, "S3", "use AWS's endpoints with IPv6 addresses", False)
    storage_class: str | None = option(
        STORAGE_CLASS,
        "S3",
        "storage class of new objects, like STANDARD_IA or INTELLIGENT_TIERING",
        None,
        otherwise="the store's",
    )
    encryption: Encryption | None = option(
        choice(Encryption),
        "S3",
        "server-side encryption of new objects",
        None,
        otherwise="the bucket's",
    )
    kms_key: str | None = option(
        KMS_KEY,
        "S3",
        "KMS key of new objects: an id, an ARN or an alias (encryption aws:kms)",
        None,
        otherwise="AWS's own",
    )
    customer_key: Path | None = option(
        PATH,
        "S3",
        "file of the key that goes with each request (SSE-C): 32 bytes, or their base64; objects"
        " that are encrypted otherwise cannot be read",
        None,
        otherwise="none",
    )
    acl: Acl | None = option(
        choice(Acl), "S3", "canned ACL of new objects", None, otherwise="the bucket's"
    )

    cache_dir: Path = option(
        PATH,
        "Cache",
        "directory for cached objects",
        factory=default_cache_dir,
        otherwise="/var/cache/fusefs for root, else ~/.cache/fusefs",
    )
    shared_cache: bool = option(
        SWITCH, "Cache", "share cached objects with mounts that use other credentials", False
    )
    cache_size: int | None = option(
        SIZE, "Cache", "maximum size of the cache", None, otherwise="what the disk allows"
    )
    min_free: MinFree = option(
        MIN_FREE, "Cache", "disk space that the cache leaves free", MinFree(percent=10.0)
    )
    revoke_after: float = option(
        LIFETIME,
        "Cache",
        "stop serving cached data after S3 has refused every request for this long",
        math.inf,
    )

    cluster_cache: MountSource | None = option(
        SOURCE,
        "Cluster cache",
        "bucket near this machine that several machines use as a common cache, between the local"
        " cache and S3",
        None,
        otherwise="none",
    )
    cluster_cache_endpoint: str | None = option(
        URL,
        "Cluster cache",
        "URL of its S3 endpoint",
        None,
        otherwise="AWS, or the AWS configuration's",
    )
    cluster_cache_credentials: Path | None = option(
        PATH,
        "Cluster cache",
        "AWS credentials file with the keys for it, in the profile default",
        None,
        otherwise="the mount's own credentials",
    )
    cluster_cache_key: Path | None = option(
        PATH,
        "Cluster cache",
        "file of the secret, 16 bytes or more, with which all machines sign the blocks that they"
        " store; without it, anyone who may write there can change the data that is read here",
        None,
        otherwise="none",
    )

    metadata_ttl: PathRules[float] = option(
        TTL,
        "Metadata",
        "how long listings and attributes are used at most before they are requested again (sooner"
        " where others have changed files lately); indefinite if the bucket never changes;"
        " TIME:PATTERN is for some paths, as in 60s,1h:data/**",
        PathRules(METADATA_TTL_S),
    )
    attribute_form: AttributeForm = option(
        choice(AttributeForm),
        "Metadata",
        "how new objects get modes, owners and times: as s3fs writes them, or as S3 Files, FSx,"
        " DataSync and Storage Gateway do; both are read, and an object keeps its form",
        AttributeForm.S3FS,
    )

    read_only: bool = option(SWITCH, "Files", "refuse every change", False)
    allow_other: bool = option(
        SWITCH, "Files", "let other users of the machine access the mount", False
    )
    noexec: bool = option(SWITCH, "Files", "run no program that is on the mount", False)
    no_control_files: bool = option(
        SWITCH,
        "Files",
        "have no files in the mount by which programs give plans and see its status (.fusefs)",
        False,
    )
    uid: int | None = option(ID, "Files", "owner of all files", None, otherwise="you")
    gid: int | None = option(ID, "Files", "group of all files", None, otherwise="yours")
    file_mode: int = option(MODE, "Files", "permissions of files", 0o644)
    dir_mode: int = option(MODE, "Files", "permissions of directories", 0o755)
    shared_group: bool = option(
        SWITCH,
        "Files",
        "show all files and directories as belonging to the group --gid, and give the group the"
        " permissions of the owner, except for files that only their owner may use (0600, 0700)",
        False,
    )

    durability: PathRules[Durability] = option(
        DURABILITY,
        "Writing",
        "where a file is stored when fsync and close return: bucket, local (the disk; uploaded"
        " a moment later) or auto (the bucket, but the disk for closes of a file that is appended"
        " to again and again); MODE:PATTERN is for some paths, as in bucket,local:runs/** (`*`"
        " within a name, `**` across directories; of several that match the last one wins)",
        EVERYWHERE_AUTO,
    )
    conflict: Conflict = option(
        choice(Conflict),
        "Writing",
        "what an upload does when another writer has replaced the object meanwhile",
        Conflict.OVERWRITE,
    )
    no_delete: bool = option(SWITCH, "Writing", "refuse to remove or overwrite objects", False)
    staging_size: int | None = option(
        SIZE,
        "Writing",
        "maximum size of the files that wait for their upload",
        None,
        otherwise="what the disk allows",
    )

    session: SessionKind = option(
        choice(SessionKind),
        "Kernel",
        "implementation of the FUSE protocol (kernel: fusefs' own)",
        SessionKind.AUTO,
    )
    passthrough: PassthroughMode = option(
        choice(PassthroughMode),
        "Kernel",
        "let the kernel read cached files directly (as root, Linux 6.9 or newer)",
        PassthroughMode.AUTO,
    )
    user: str | None = option(
        WORD,
        "Survival",
        "user that the daemon runs as when root mounts",
        None,
        otherwise="fusefs, or a number of the cache directory's own, where they can run it",
    )
    max_pause: float = option(
        DURATION,
        "Survival",
        "how long requests wait while the mount has no daemon, before the mount fails",
        300.0,
    )
    hang_timeout: float = option(
        SILENCE, "Survival", "how long a daemon may be silent before it is replaced", 30.0
    )
    max_connections: int = option(
        CONNECTIONS, "Limits", "maximum number of simultaneous requests to S3", 128
    )
    memory_limit: int = option(
        at_least(LEAST, SIZE),
        "Limits",
        "memory that the daemon may use (112MiB or more)",
        256 * MIB,
    )
    retry_time: float = option(
        DURATION, "Limits", "how long a failing request is retried before it is an error", 60.0
    )

    log_level: LogLevel = option(
        choice(LogLevel), "Logging", "least severe level to log", LogLevel.INFO
    )
    log_format: LogFormat = option(
        choice(LogFormat),
        "Logging",
        "form of the log: lines, or a JSON object each",
        LogFormat.TEXT,
    )
    log_file: Path | None = option(
        PATH,
        "Logging",
        "file for the log",
        None,
        otherwise="/var/log/fusefs/ for root, else ~/.local/state/fusefs/; "
        "in the foreground standard error",
    )
    foreground: bool = option(
        SWITCH, "Logging", "stay in the foreground until the mount ends", False
    )

    @property
    def mount_request(self) -> MountRequest:
        """The arguments with which mount(2) or fusermount3 makes this mount."""
        source = str(self.source)
        return MountRequest(source, self.mountpoint, self.allow_other, self.read_only, self.noexec)

    def as_texts(self) -> dict[str, str]:
        """Return the settings that are not None as texts, by field name."""
        return {
            name: type.show(value)
            for name, type in _TYPES.items()
            if (value := getattr(self, name)) is not None
        }

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> MountSettings:
        """Build settings from texts of `as_texts`, also of another version; ignore unknown names.

        Raises:
            SettingsError: `texts` is no mapping of texts, or for the same reasons as in `build`.
        """
        try:
            known = {name: text for name, text in dict(texts).items() if name in _TYPES}
        except (ValueError, TypeError):
            raise SettingsError("the settings are not texts by their names") from None
        return build({name: RawValue(str(text), name) for name, text in known.items()})

    def changed(self, changes: Layer) -> MountSettings:
        """Return a copy of these settings with the values of `changes`. Raises SettingsError."""
        return build(
            changes, {name: RawValue(text, name) for name, text in self.as_texts().items()}
        )


def _setting(item: Field[Any]) -> Setting:
    type, group, help, otherwise = item.metadata["setting"]
    return Setting(item.name, type, group, help, otherwise or type.show(item.default))


SETTINGS: tuple[Setting, ...] = tuple(
    _setting(item) for item in fields(MountSettings) if "setting" in item.metadata
)
_TYPES: dict[str, SettingType[Any]] = {
    "source": SOURCE,
    "mountpoint": PATH,
    **{setting.name: setting.type for setting in SETTINGS},
}
_REQUIRED = frozenset(
    item.name
    for item in fields(MountSettings)
    if item.default is MISSING and item.default_factory is MISSING
)


# The settings that can't change during the mount, because the kernel's mount, the keeper or state
# on the disk depends on them.
FIXED = frozenset(
    (
        "source",
        "mountpoint",
        "customer_key",  # the cache belongs to an identity, of which the key is a part
        "cache_dir",
        "shared_cache",
        "session",
        "passthrough",
        "allow_other",
        "noexec",
        "read_only",
        "user",
        "max_pause",
        "hang_timeout",
        "foreground",
        "log_file",
        "log_format",
    )
)

# --- where settings come from -------------------------------------------------


@dataclass(frozen=True, slots=True)
class RawValue:
    """The text of one setting, and its origin (a flag, variable or file) for error messages."""

    text: str
    origin: str


Layer = Mapping[str, RawValue]


def build(*layers: Layer) -> MountSettings:
    """Build settings from all layers; of several texts for a setting, the first layer's wins.

    Raises:
        SettingsError: a text cannot be read, a required setting is missing, or two
            settings contradict each other.
    """
    merged: dict[str, RawValue] = {}
    for layer in reversed(layers):
        merged.update(layer)
    values: dict[str, Any] = {name: _read(name, value) for name, value in merged.items()}
    if missing := _REQUIRED - values.keys():
        raise SettingsError(f"{min(missing)}: missing")
    settings = MountSettings(**values)
    _refuse_contradictions(settings, merged)
    return settings


def _read(name: str, value: RawValue) -> object:
    if name not in _TYPES:
        raise SettingsError(f"{value.origin}: there is no such setting")
    try:
        return _TYPES[name].read(value.text)
    except ValueError as error:
        raise SettingsError(f"{value.origin}: {error}") from None


def _refuse_contradictions(settings: MountSettings, layer: Layer) -> None:
    if settings.kms_key and settings.encryption == Encryption.S3:
        raise SettingsError(
            f"{layer['kms_key'].origin}: is for encryption {Encryption.KMS} or {Encryption.DOUBLE}"
        )
    if settings.endpoint_url and (settings.fips or settings.dual_stack):
        name = "fips" if settings.fips else "dual_stack"
        raise SettingsError(f"{layer[name].origin}: is for AWS's own endpoints; drop endpoint-url")
    if settings.customer_key and (settings.encryption or settings.kms_key):
        name = "encryption" if settings.encryption else "kms_key"
        raise SettingsError(f"{layer[name].origin}: S3 encrypts with the customer key already")
    _refuse_cluster_cache(settings, layer)
    if settings.anonymous and settings.profile:
        raise SettingsError(
            f"{layer['profile'].origin}: an anonymous mount uses no profile; drop one of the two"
        )
    for name, path in (("cache_dir", settings.cache_dir), ("log_file", settings.log_file)):
        if path is not None and path.is_relative_to(settings.mountpoint):
            origin = layer[name].origin if name in layer else name
            raise SettingsError(f"{origin}: {path} is below the mountpoint; choose another path")


def _refuse_cluster_cache(settings: MountSettings, layer: Layer) -> None:
    if settings.cluster_cache is None:
        return
    origin = layer["cluster_cache"].origin
    if _is_same_place(settings.cluster_cache, settings):
        raise SettingsError(f"{origin}: is part of what is mounted; name another prefix or bucket")
    if settings.customer_key:
        raise SettingsError(
            f"{origin}: what a customer key encrypts is stored nowhere else; drop one of the two"
        )


def _is_same_place(place: MountSource, settings: MountSettings) -> bool:
    """True if some keys would belong both to the cluster cache at `place` and to the mount."""
    prefixes = place.prefix, settings.source.prefix
    return (
        place.bucket == settings.source.bucket
        and settings.cluster_cache_endpoint == settings.endpoint_url
        and (prefixes[0].startswith(prefixes[1]) or prefixes[1].startswith(prefixes[0]))
    )
