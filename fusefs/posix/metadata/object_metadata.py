"""Modes, owners, times and extended attributes as object metadata, as s3fs and rclone write them.

| key | what it says |
| --- | --- |
| `mode` | st_mode with the file type: s3fs in decimal, `rclone --metadata` in octal |
| `uid`, `gid` | decimal |
| `mtime` | seconds since the epoch, with a fraction or without |
| `xattr` | JSON, percent-encoded: {name: value in base64} |

What an object lacks, or what cannot be read, is the mount's default. Set-id
bits and device types in a bucket are ignored: the right to write there is not
the right to become root here. s3fs' `atime` and `ctime` are not kept, which
would be wrong after the next change. What else is there is kept as it is.
"""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

from fusefs.store.fencing import CHANGE, CHANGE_SIZE, METADATA_LIMIT

# The permissions that are taken from a bucket, and given to it.
PERMISSIONS = 0o1777
SECOND_NS = 1_000_000_000
# The target of a symbolic link, which is the content of its object, has at most so many bytes.
LONGEST_TARGET = 4095
# Times lie between this and its negative, which is the years from 1677 to 2262.
MOST_NS = (1 << 63) - 1
_HEADER_PREFIX = "x-amz-meta-"
_READ = {"mode", "uid", "gid", "mtime", "xattr"}
# The token of the change that made an object says nothing about its content.
_OWN = _READ | {"atime", "ctime", CHANGE}


@dataclass(frozen=True, slots=True)
class Meta:
    """What POSIX keeps with a file; `mode` has the type, `mtime_ns` None is the object's own.

    `xattrs` are names and values in the order of their setting; `other` is
    metadata of the object that means nothing here.
    """

    mode: int
    uid: int
    gid: int
    mtime_ns: int | None = None
    xattrs: tuple[tuple[str, bytes], ...] = ()
    other: tuple[tuple[str, str], ...] = ()

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)

    def changed(self, **changes: Any) -> Meta:
        return replace(self, **changes)

    def as_metadata(self) -> dict[str, str]:
        """The object metadata that says this."""
        metadata = dict(self.other)
        metadata |= {"mode": str(self.mode), "uid": str(self.uid), "gid": str(self.gid)}
        if self.mtime_ns is not None:
            seconds, rest = divmod(abs(self.mtime_ns), SECOND_NS)
            metadata["mtime"] = f"{'-' if self.mtime_ns < 0 else ''}{seconds}.{rest:09}"
        if self.xattrs:
            metadata["xattr"] = _written(self.xattrs)
        return metadata

    @property
    def fits(self) -> bool:
        """Whether S3 takes that much."""
        metadata = self.changed(
            mtime_ns=0 if self.mtime_ns is None else self.mtime_ns
        ).as_metadata()
        size = sum(len(_HEADER_PREFIX) + len(name) + len(value) for name, value in metadata.items())
        return size + len(_HEADER_PREFIX) + CHANGE_SIZE <= METADATA_LIMIT


def has_attributes_in(metadata: Mapping[str, str]) -> bool:
    """Whether an object's metadata says anything of what POSIX keeps with a file."""
    return not _READ.isdisjoint(metadata)


def read(metadata: Mapping[str, str], default: Meta) -> Meta:
    """What an object's metadata says, and the default for the rest."""
    kind = stat.S_IFMT(default.mode)
    mode = _mode(metadata.get("mode"), kind)
    if mode is not None and stat.S_ISLNK(mode):
        kind = stat.S_IFLNK
    permissions = default.mode & PERMISSIONS if mode is None else mode & PERMISSIONS
    uid, gid = _whole(metadata.get("uid")), _whole(metadata.get("gid"))
    return Meta(
        kind | permissions,
        default.uid if uid is None else uid,
        default.gid if gid is None else gid,
        _time(metadata.get("mtime")),
        _read_xattrs(metadata.get("xattr")),
        tuple(
            (name, value)
            for name, value in metadata.items()
            if name not in _OWN and _is_header(value)
        ),
    )


def _mode(text: str | None, kind: int) -> int | None:
    """The mode of a file or directory (`kind`); a file may turn out to be a symbolic link.

    As decimal and as octal number no text has a type that fits both times, so
    that tells who wrote it. Without a type it is taken for decimal.
    """
    value = _whole(text)
    if text is None or value is None:
        return None
    wanted = {kind, stat.S_IFLNK} if kind == stat.S_IFREG else {kind}
    if stat.S_IFMT(value) in wanted and value < 1 << 16:
        return value
    if not set(text) - set("01234567") and stat.S_IFMT(int(text, 8)) in wanted:
        return int(text, 8)
    return value


def _whole(text: str | None) -> int | None:
    """A number that fits an id or a mode."""
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 10:
        return None
    value = int(text)
    return value if value < 1 << 32 else None


def _time(text: str | None) -> int | None:
    if text is None:
        return None
    seconds, _, fraction = text.removeprefix("-").partition(".")
    digits = seconds + fraction
    if not seconds or not digits.isascii() or not digits.isdecimal() or len(seconds) > 10:
        return None
    value = int(seconds) * SECOND_NS + int((fraction + "000000000")[:9])
    if value > MOST_NS:
        return None
    return -value if text.startswith("-") else value


def _written(xattrs: tuple[tuple[str, bytes], ...]) -> str:
    values = {name: base64.b64encode(value).decode() for name, value in xattrs}
    return quote(json.dumps(values, separators=(",", ":"), ensure_ascii=False))


def _read_xattrs(text: str | None) -> tuple[tuple[str, bytes], ...]:
    if text is None:
        return ()
    try:
        values = dict(json.loads(unquote(text, errors="strict")))
        for name in values:
            name.encode()  # JSON has halves of characters, and other keys than texts
        return tuple((name, base64.b64decode(value)) for name, value in values.items())
    except (ValueError, TypeError, AttributeError, RecursionError):
        return ()


def _is_header(value: str) -> bool:
    """Whether a value can be sent again; what was decoded to something else cannot."""
    return bool(value) and value.isascii() and value.isprintable() and value == value.strip()
