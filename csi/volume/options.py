"""The options for a volume's mounts, from its attributes and mount options.

Both accept the settings of `fusefs mount` that a user of a node may choose, under the setting's own
name (`cache-size`) or in Kubernetes' spelling (`cacheSize`). Attributes in `_OWN` also choose the
identity, the time limit for uploads at the end, and the files to fetch before they are read. All
other options are refused: those that name a path of the node, reach another host, or are decided by
the node. An inline volume may have fewer options, since any author of a pod can write one.

The functions raise InvalidArgumentError, whose message names the attribute or option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from csi.errors import InvalidArgumentError
from csi.volume.location import Location
from fusefs.settings.mount import Layer, MountSettings, RawValue, SettingsError, build
from fusefs.settings.sources import split_options
from fusefs.settings.types import DURATION, SIZE, SWITCH, Durability, MinFree, MountSource

# Settings whose values the driver does not limit.
_FREE = frozenset(
    (
        "read_only",
        "uid",
        "gid",
        "file_mode",
        "dir_mode",
        "metadata_ttl",
        "requester_pays",
        "fips",
        "dual_stack",
        "storage_class",
        "encryption",
        "kms_key",
        "acl",
        "durability",
        "conflict",
        "no_delete",
        "no_control_files",
        "retry_time",
        "log_level",
        "passthrough",
        "attribute_form",
    )
)
# Settings of which the node gives each mount a share: a volume may ask for less, never for more.
_SHARED = frozenset(("cache_size", "memory_limit", "max_connections"))
_TAKEN = _FREE | _SHARED
_OWN = frozenset(
    (
        "roleArn",
        "podIdentity",
        "anonymous",
        "cacheDomain",
        "allowLocalDurability",
        "drainTimeout",
        "warm",
        "warmShards",
        "warmBeforePublish",
        "warmTimeout",
    )
)
# Attributes that only an administrator may set, not the author of an inline volume.
_NOT_INLINE = frozenset(("cacheDomain", "allowLocalDurability"))
_KNOWN_FLAGS = {"ro": ("read_only", "true"), "rw": ("read_only", "false")}

_ROLE = re.compile(r"arn:[a-z0-9-]+:[a-z0-9-]*:[a-z0-9-]*:[0-9]*:role/[\w+=,.@/-]{1,600}")
_DOMAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
DRAIN_TIMEOUT_S = 600.0
WARM_TIMEOUT_S = 600.0
# The maximum number of pods that a Kubernetes Job with a backoffLimitPerIndex completes.
MOST_SHARDS = 100_000
# The maximum number of paths, each a job of the daemon; a path may be a directory or a pattern.
MOST_WARM_PATHS = 100
# The end of the names of numbered pods. An Indexed Job names its pods JOB-INDEX-RANDOM (the random
# part has these letters, so that it is no word); a StatefulSet, and the workers of most operators,
# NAME-INDEX. (https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode)
_NUMBERED = re.compile(r"-([0-9]{1,5})(?:-[bcdfghjklmnpqrstvwxz2456789]{5})?\Z")
# The maximum length of a key in bytes.
_LONGEST_KEY = 1024
# The maximum time for a request's retries: its caller does not wait any longer.
LONGEST_RETRY_S = 300.0
# More than a minute, because refusals may be temporary while a change of policies spreads.
REVOKE_AFTER = "120s"


@dataclass(frozen=True, slots=True)
class WarmOption:
    """The paths of a volume to fetch before they are read; "" stands for the whole volume.

    With `is_first` a pod starts only when the files are fetched, or after `timeout_s`. `shards` is
    the number of parts into which the files are split; a pod fetches `part`, counted from 0.
    """

    paths: tuple[str, ...] = ()
    is_first: bool = False
    timeout_s: float = WARM_TIMEOUT_S
    shards: int | None = None
    part: int | None = None

    def of_pod(self, name: str) -> WarmOption:
        """Return the option for the pod `name`; with `shards` the number in it chooses the part.

        A pod without a number in its name then fetches nothing. Kubelet sends a driver the pod's
        name, but neither its labels nor its annotations; to read these from the API server, every
        node would need the right to read all pods.
        """
        if self.shards is None:
            return self
        number = _NUMBERED.search(name)
        return replace(self, part=int(number[1]) % self.shards) if number else WarmOption()


@dataclass(frozen=True, slots=True)
class Options:
    """The options that a volume's attributes and mount options ask for.

    `settings` are the texts of settings of `fusefs mount`, by field names; `wanted` has the values
    of these settings, with placeholders for paths. Times are in seconds.
    """

    settings: Layer
    wanted: MountSettings
    role_arn: str | None = None
    is_anonymous: bool = False
    cache_domain: str | None = None
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    warm: WarmOption = WarmOption()
    has_pod_identity: bool = False


@dataclass(frozen=True, slots=True)
class NodeShares:
    """The node's limits for one mount. Sizes are in bytes; None means no limit."""

    memory_limit: int
    max_connections: int
    cache_size: int | None
    min_free: MinFree


def read_options(
    attributes: Mapping[str, str], mount_flags: Sequence[str], *, is_inline: bool
) -> Options:
    """Read the options of a volume; `attributes` must not include its location."""
    if is_inline:
        for name in sorted(_NOT_INLINE & attributes.keys()):
            raise InvalidArgumentError(f"{name}: not for an inline volume, which is its pod's own")
    settings = dict(_from_flags(mount_flags)) | _from_attributes(attributes)
    wanted = _built(settings, anywhere())
    if is_inline:
        _check_tenant(settings, attributes)
    is_local_allowed = _switch(attributes, "allowLocalDurability")
    if Durability.LOCAL in wanted.durability.values and not is_local_allowed:
        raise InvalidArgumentError(
            f"{settings['durability'].origin}: local loses files with the node; it needs"
            ' allowLocalDurability: "true" in the StorageClass'
        )
    return Options(
        settings,
        wanted,
        _text(attributes, "roleArn", _ROLE, "is not like arn:aws:iam::123456789012:role/x"),
        _switch(attributes, "anonymous"),
        _text(attributes, "cacheDomain", _DOMAIN, "is no name"),
        _duration(attributes, "drainTimeout", DRAIN_TIMEOUT_S),
        _warm(attributes),
        _switch(attributes, "podIdentity"),
    )


def _from_attributes(attributes: Mapping[str, str]) -> dict[str, RawValue]:
    found: dict[str, RawValue] = {}
    for name, value in sorted(attributes.items()):
        if name in _OWN:
            continue
        field = _field(name, name)
        if field in found:
            raise InvalidArgumentError(f"{name}: given as {found[field].origin} as well")
        found[field] = RawValue(value, name)
    return found


def _from_flags(mount_flags: Sequence[str]) -> list[tuple[str, RawValue]]:
    found = []
    for flag in mount_flags:
        for option in filter(None, split_options(flag)):
            name, separator, value = option.partition("=")
            if option in _KNOWN_FLAGS:
                field, value = _KNOWN_FLAGS[option]
            else:
                field = _field(name, f"mountOptions: {name}")
                value = value if separator else "true"
            found.append((field, RawValue(value, f"mountOptions: {name}")))
    return found


def _field(name: str, origin: str) -> str:
    field = re.sub(r"[A-Z]", lambda match: "_" + match[0].lower(), name).replace("-", "_")
    if field.startswith("cluster_cache"):
        raise InvalidArgumentError(
            f"{origin}: not for a volume: the node decides which cluster cache a cacheDomain has"
            " (fusefs-csi node --cluster-caches)"
        )
    if field == "customer_key":
        raise InvalidArgumentError(
            f"{origin}: the volume's Secret has the key, as its field customer_key: an attribute is"
            " no secret"
        )
    if field in ("endpoint", "endpoint_url"):
        raise InvalidArgumentError(
            f"{origin}: not for a volume: `store` names a store of the driver's configuration"
        )
    if field not in _TAKEN or "_" in name:
        raise InvalidArgumentError(f"{origin}: not a setting that a volume can have")
    return field


def anywhere() -> Layer:
    """Return placeholders for source, mountpoint and cache, to check other settings with."""
    return {
        "source": RawValue("s3://bucket", "source"),
        "mountpoint": RawValue("/mnt", "mountpoint"),
        "cache_dir": RawValue("/cache", "cache_dir"),
    }


def _check_tenant(settings: Layer, attributes: Mapping[str, str]) -> None:
    """Refuse an inline volume's options that harm others: long waits for uploads, long logs."""
    if _duration(attributes, "drainTimeout", DRAIN_TIMEOUT_S) > DRAIN_TIMEOUT_S:
        raise InvalidArgumentError(
            f"drainTimeout: at most {DURATION.show(DRAIN_TIMEOUT_S)} for an inline volume"
        )
    level = settings.get("log_level")
    if level is not None and level.text.strip() == "debug":
        raise InvalidArgumentError(f"{level.origin}: debug is not for an inline volume")


def is_cache_domain(text: str) -> bool:
    """True if `text` is a valid `cacheDomain`."""
    return _DOMAIN.fullmatch(text) is not None


def _text(
    attributes: Mapping[str, str], name: str, pattern: re.Pattern[str], why: str
) -> str | None:
    text = attributes.get(name)
    if text is not None and not pattern.fullmatch(text):
        raise InvalidArgumentError(f"{name}: {text!r} {why}")
    return text


def _switch(attributes: Mapping[str, str], name: str) -> bool:
    try:
        return bool(SWITCH.read(attributes.get(name, "false")))
    except ValueError as error:
        raise InvalidArgumentError(f"{name}: {error}") from None


def _duration(attributes: Mapping[str, str], name: str, default_s: float) -> float:
    if name not in attributes:
        return default_s
    try:
        return float(DURATION.read(attributes[name]))
    except ValueError as error:
        raise InvalidArgumentError(f"{name}: {error}") from None


def _warm(attributes: Mapping[str, str]) -> WarmOption:
    is_first = _switch(attributes, "warmBeforePublish")
    timeout_s = _duration(attributes, "warmTimeout", WARM_TIMEOUT_S)
    if "warm" not in attributes:
        for name in ("warmShards", "warmBeforePublish", "warmTimeout"):
            if name in attributes:
                raise InvalidArgumentError(
                    f"{name}: needs the attribute warm, which names the paths"
                )
        return WarmOption()
    paths = dict.fromkeys(_warm_path(text.strip()) for text in attributes["warm"].split(","))
    if len(paths) > MOST_WARM_PATHS:
        raise InvalidArgumentError(
            f"warm: over {MOST_WARM_PATHS} paths; name directories or patterns"
        )
    return WarmOption(tuple(paths), is_first, timeout_s, _shards(attributes))


def _shards(attributes: Mapping[str, str]) -> int | None:
    text = attributes.get("warmShards")
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,6}", text) or not 1 <= int(text) <= MOST_SHARDS:
        raise InvalidArgumentError(
            f"warmShards: {text!r} is no number of parts from 1 to {MOST_SHARDS}"
        )
    return int(text)


def _warm_path(text: str) -> str:
    if text in (".", "/"):
        return ""
    path = text.removesuffix("/")
    if path.startswith("/"):
        raise InvalidArgumentError(f"warm: {text!r} is not relative to the volume")
    if any(segment in ("", ".", "..") for segment in path.split("/")) or not path.isprintable():
        raise InvalidArgumentError(f"warm: {text!r} is no path in its normal form")
    if len(path.encode()) > _LONGEST_KEY:
        raise InvalidArgumentError(f"warm: a path of over {_LONGEST_KEY} bytes")
    return path


# --- the settings of a mount ----------------------------------------------------


def mount_layer(
    options: Options,
    location: Location,
    shares: NodeShares,
    cluster_cache: Mapping[str, str],
    *,
    is_read_only: bool,
    fs_group: int | None,
) -> dict[str, RawValue]:
    """Return the texts of all settings of a volume's mount except the paths and the user.

    `cluster_cache` has the texts of the settings of the domain's cluster cache.
    """
    layer = {"read_only": RawValue("false", "the driver's default"), **options.settings}
    if is_read_only:
        layer["read_only"] = RawValue("true", "the access mode")
    if fs_group is not None:
        layer["gid"] = RawValue(str(fs_group), "fsGroup")
        # As Kubernetes specifies, files belong to the group, which may read and write them.
        layer["shared_group"] = RawValue("true", "fsGroup")
    layer |= _limited(options, shares)
    store = location.store
    fixed = {
        "source": str(MountSource(location.bucket, location.prefix)),
        "endpoint_url": store.endpoint_url,
        "region": location.region,
        "addressing": store.addressing,
        "ca_bundle": str(store.ca_bundle) if store.ca_bundle else None,
        "anonymous": "true" if options.is_anonymous else None,
        "min_free": str(shares.min_free),
        # The time for which an identity whose rights have ended may still read from the cache.
        "revoke_after": REVOKE_AFTER,
        "allow_other": "true",
        # Mounts of one identity share the cache directory, even if the identity's keys change.
        "shared_cache": "true",
        # The log goes to standard error, which is the container's log.
        "foreground": "true",
        "session": "kernel",
        **cluster_cache,
    }
    return layer | {
        name: RawValue(text, "the driver") for name, text in fixed.items() if text is not None
    }


def _limited(options: Options, shares: NodeShares) -> dict[str, RawValue]:
    settings, wanted = options.settings, options.wanted
    # A volume without these settings gets the node's share, which may exceed a mount's default.
    memory_limit, connections = shares.memory_limit, shares.max_connections
    if "memory_limit" in settings:
        memory_limit = min(wanted.memory_limit, memory_limit)
    if "max_connections" in settings:
        connections = min(wanted.max_connections, connections)
    limits = {
        "memory_limit": SIZE.show(memory_limit),
        "max_connections": str(connections),
        "retry_time": DURATION.show(min(wanted.retry_time, LONGEST_RETRY_S)),
    }
    sizes = [size for size in (wanted.cache_size, shares.cache_size) if size is not None]
    if sizes:
        limits["cache_size"] = SIZE.show(min(sizes))
    return {name: RawValue(text, "the node's share") for name, text in limits.items()}


def finished(layer: Layer, **more: str) -> MountSettings:
    """Build the settings from a layer and the texts in `more`; the texts in `more` win."""
    return _built({name: RawValue(text, name) for name, text in more.items()}, layer)


def _built(*layers: Layer) -> MountSettings:
    try:
        return build(*layers)
    except SettingsError as error:
        raise InvalidArgumentError(str(error)) from None
