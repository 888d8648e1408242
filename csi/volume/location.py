"""The location of a volume's data, and the format of volume ids.

A volume is a bucket or a prefix of a bucket, in a configured store. The id of a volume that the
driver made is `<store>/<bucket>/<name>`; for other volumes an administrator chooses any id. The
attributes of both kinds of volume have the location.

The functions raise InvalidArgumentError, whose message names the attribute and the reason.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from csi.errors import InvalidArgumentError
from csi.volume.stores import AWS, Stores, StoreSettings, is_region
from fusefs.posix.nodes.names import PRIVATE
from fusefs.store.s3.settings import obstacle as bucket_obstacle

# The attributes with a volume's location; all other attributes are options for its mounts.
LOCATION_KEYS = frozenset(("store", "bucket", "prefix", "region"))
# Prefixes of the keys that kubelet and the sidecars add to attributes and parameters.
_ADDED = ("csi.storage.k8s.io/", "storage.kubernetes.io/")
# The maximum number of bytes: a key in S3 has at most 1024, of which file names need some.
MAX_PREFIX = 900
# The maximum length of a field in the CSI specification.
MAX_ID = 128

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_AMBIGUOUS = re.compile(r"\}[a-z0-9-]*\$\{")  # `a-b-c` can be two pairs of values


@dataclass(frozen=True, slots=True)
class VolumeId:
    """The id of a volume that CreateVolume made."""

    store: str
    bucket: str
    name: str

    def __str__(self) -> str:
        return f"{self.store}/{self.bucket}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> VolumeId | None:
        """Parse a volume id; return None if CreateVolume makes no such id."""
        parts = text.split("/")
        if len(parts) != 3 or len(text.encode()) > MAX_ID:
            return None
        store, bucket, name = parts
        if not store or not is_bucket(bucket) or not _NAME.fullmatch(name):
            return None
        return cls(store, bucket, name)


def new_volume_id(store: str, bucket: str, name: str) -> VolumeId:
    """Return the id for a volume's name, which the caller chose and which may be any text.

    A name that does not fit into an id is replaced by its digest.
    """
    if VolumeId.parse(str(VolumeId(store, bucket, name))) is None:
        name = "volume-" + hashlib.sha256(name.encode()).hexdigest()[:32]
    return VolumeId(store, bucket, name)


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a volume's data. `prefix` is "" or ends with its only trailing slash."""

    store: StoreSettings
    bucket: str
    prefix: str
    region: str | None = None

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def own(given: Mapping[str, str]) -> dict[str, str]:
    """Return parameters or attributes without the entries of kubelet and the sidecars."""
    return {name: value for name, value in given.items() if not name.startswith(_ADDED)}


def without_location(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes without the location: they are options for the volume's mounts."""
    return {name: value for name, value in attributes.items() if name not in LOCATION_KEYS}


def location_of(attributes: Mapping[str, str], stores: Stores) -> Location:
    """Return the location of the volume with these attributes."""
    store = stores.choose(attributes.get("store", AWS))
    bucket = attributes.get("bucket", "")
    if not bucket:
        raise InvalidArgumentError("bucket: missing")
    if not is_bucket(bucket):
        raise InvalidArgumentError(
            f"bucket: {bucket!r} is no name of a bucket; an access point has its alias"
        )
    if (obstacle := bucket_obstacle(bucket, is_aws=store.endpoint_url is None)) is not None:
        raise InvalidArgumentError(f"bucket: {obstacle}")
    region = attributes.get("region")
    if region is not None and not is_region(region):
        raise InvalidArgumentError(f"region: {region!r} is no region")
    prefix = normal_prefix(attributes.get("prefix", ""))
    return Location(store, bucket, prefix, region or store.region)


def is_bucket(text: str) -> bool:
    """True if `text` is a valid bucket name: other texts could be another host, or an ARN."""
    return bool(_BUCKET.fullmatch(text)) and ".." not in text and not _ADDRESS.fullmatch(text)


def normal_prefix(text: str) -> str:
    """Return the normal form of a prefix: "" for a whole bucket, else without a leading slash.

    The prefix ends with one slash, so that `team-a` does not include `team-ab`.
    """
    if text in ("", "/"):
        return ""
    inner = text.removeprefix("/").removesuffix("/")
    for segment in inner.split("/"):
        _check_segment(text, segment)
    prefix = inner + "/"
    if len(prefix.encode()) > MAX_PREFIX:
        raise InvalidArgumentError(f"prefix: over {MAX_PREFIX} bytes")
    return prefix


def _check_segment(prefix: str, segment: str) -> None:
    why = ""
    if segment == "":
        why = "has an empty segment"
    elif segment in (".", ".."):
        why = f"has a segment {segment!r}"
    elif segment == PRIVATE:
        why = f"has a segment {PRIVATE!r}, which is the driver's own"
    elif any(unicodedata.category(character) == "Cc" for character in segment):
        why = "has a control character"
    if why:
        raise InvalidArgumentError(f"prefix: {prefix!r} {why}")


def fill_in(template: str, values: Mapping[str, str]) -> str:
    """Return the prefix for a template with `${variables}`, in its normal form."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            known = ", ".join("${" + known + "}" for known in values)
            raise InvalidArgumentError(f"prefix: ${{{name}}} is none of {known}")
        if not values[name]:
            raise InvalidArgumentError(
                f"prefix: ${{{name}}} is unknown; run the provisioner with --extra-create-metadata"
            )
        if "/" in values[name]:
            raise InvalidArgumentError(f"prefix: ${{{name}}} is {values[name]!r}, with a slash")
        return values[name]

    normal_prefix(template)
    if "${" in _VARIABLE.sub("", template):
        raise InvalidArgumentError(f"prefix: {template!r} has a variable without an end")
    for segment in template.split("/"):
        if _AMBIGUOUS.search(segment) and "${pv.name}" not in segment:
            raise InvalidArgumentError(f"prefix: {segment!r} can be that of two claims: use '/'")
    return normal_prefix(_VARIABLE.sub(value_of, template))


def has_segment(template: str, segment: str) -> bool:
    """True if one of the segments of a prefix or template, between slashes, is `segment`."""
    return segment in template.split("/")


def overlap(one: str, other: str) -> bool:
    """True if two normal prefixes are equal, or one lies within the other."""
    return one.startswith(other) or other.startswith(one)
