"""Modes, owners and times as object metadata, as s3fs and rclone write them.

The keys are `mode` (st_mode in decimal, with the file type), `uid`, `gid` and
`mtime` (seconds since the epoch, with a fraction). What an object lacks, or
what cannot be read, is the mount's default. Set-id bits and device types in a
bucket are never believed: who may write there is not who may become root here.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace

# The permissions that are taken from a bucket, and given to it.
PERMISSIONS = 0o1777
SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Meta:
    """What POSIX keeps with a file; `mode` has the type, `mtime_ns` None is the object's own."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int | None = None

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)

    def changed(self, **changes: int | None) -> Meta:
        return replace(self, **changes)  # type: ignore[arg-type]

    def as_metadata(self) -> dict[str, str]:
        """The object metadata that says this."""
        said = {"mode": str(self.mode), "uid": str(self.uid), "gid": str(self.gid)}
        if self.mtime_ns is not None:
            seconds, rest = divmod(self.mtime_ns, SECOND_NS)
            said["mtime"] = f"{seconds}.{rest:09}"
        return said


def read(metadata: Mapping[str, str], default: Meta) -> Meta:
    """What an object's metadata says, and the default for the rest."""
    mode = _whole(metadata.get("mode"))
    kind = stat.S_IFMT(default.mode)
    if mode is not None and kind == stat.S_IFREG and stat.S_IFMT(mode) == stat.S_IFLNK:
        kind = stat.S_IFLNK
    permissions = default.mode & PERMISSIONS if mode is None else mode & PERMISSIONS
    uid, gid = _whole(metadata.get("uid")), _whole(metadata.get("gid"))
    return Meta(
        kind | permissions,
        default.uid if uid is None else uid,
        default.gid if gid is None else gid,
        _time(metadata.get("mtime")),
    )


def _whole(text: str | None) -> int | None:
    """A number that fits an id or a mode."""
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 10:
        return None
    value = int(text)
    return value if value < 1 << 32 else None


def _time(text: str | None) -> int | None:
    if text is None:
        return None
    seconds, _, fraction = text.partition(".")
    try:
        value = int(seconds) * SECOND_NS + int((fraction + "000000000")[:9])
    except ValueError:
        return None
    return value if math.fabs(value) < 1 << 62 else None
