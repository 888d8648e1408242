"""Modes, owners, times and extended attributes as object metadata, in two forms.

| s3fs, rclone | AWS | value |
| --- | --- | --- |
| `mode` | `file-permissions` | st_mode with the file type: s3fs in decimal, others in octal |
| `uid`, `gid` | `file-owner`, `file-group` | decimal |
| `mtime` | `file-mtime` | seconds since the epoch; with AWS nanoseconds and `ns`, or milliseconds |
| `xattr` | | JSON, percent-encoded: {name: value in base64}, in both forms |

S3 Files, FSx for Lustre, File Cache, DataSync and Storage Gateway use AWS's form. An object keeps
its form, or both, when its attributes change; an object without any gets the mount's form
(`--attribute-form`). If an object has both forms and they differ, s3fs's form counts.

An attribute that an object lacks, or that cannot be read, gets the mount's default. Defaults are
never written into an object, because they are only this mount's view of the bucket. Set-id bits
and device types in a bucket are ignored: the right to write to the bucket must not be the right to
become root on this machine. s3fs's `atime` and `ctime` are dropped, as they would be wrong after
the next change. All other metadata is kept as it is.
"""

from __future__ import annotations

import base64
import enum
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

from fusefs.store.fencing import CHANGE, has_room
from fusefs.store.interface import ObjectInfo
from fusefs.store.s3.head import sendable

# The permission bits that are read from a bucket, and written to it.
PERMISSIONS = 0o1777
SECOND_NS = 1_000_000_000
# The longest target of a symbolic link, in bytes; the target is the object's content. The
# kernel accepts no longer target (PATH_MAX without the NUL).
LONGEST_TARGET = 4095
# Times lie between -MOST_NS and MOST_NS, the years from 1677 to 2262.
MOST_NS = (1 << 63) - 1
NONE_SET = frozenset(("mode", "uid", "gid"))
_S3FS = ("mode", "uid", "gid", "mtime")
_AWS = ("file-permissions", "file-owner", "file-group", "file-mtime")
_READ = {*_S3FS, *_AWS, "xattr"}
# Names that are not in `Meta.other`. CHANGE, the token of the change that made the object, is
# not in it because it says nothing about the content.
_OWN = _READ | {"atime", "ctime", CHANGE}


class Form(enum.Flag):
    """The two forms of attributes in an object's metadata: s3fs's (also rclone's) and AWS's."""

    S3FS = 1
    AWS = 2


@dataclass(frozen=True, slots=True)
class Meta:
    """The POSIX attributes of an object; `mode` includes the file type.

    `mtime_ns` is None if Last-Modified is the time. `xattrs` are names and values in the
    order in which they were set; `other` is metadata that is no attribute; `form` is the form
    to write. `unset` names those of mode, uid and gid for which the mount's defaults count.
    """

    mode: int
    uid: int
    gid: int
    mtime_ns: int | None = None
    xattrs: tuple[tuple[str, bytes], ...] = ()
    other: tuple[tuple[str, str], ...] = ()
    form: Form = Form.S3FS
    unset: frozenset[str] = frozenset()

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)

    def changed(self, **changes: Any) -> Meta:
        """Make a copy with these changes; the changed attributes are no longer `unset`."""
        return replace(self, unset=self.unset - changes.keys(), **changes)

    def as_metadata(self) -> dict[str, str]:
        metadata = dict(self.other)
        numbers = {"mode": self.mode, "uid": self.uid, "gid": self.gid}
        own = [name for name in numbers if name not in self.unset]
        if Form.S3FS in self.form:
            metadata |= {name: str(numbers[name]) for name in own}
        if Form.AWS in self.form:
            values = (f"{self.mode:07o}", str(self.uid), str(self.gid))
            written = zip(numbers, _AWS, values, strict=False)
            metadata |= {key: value for name, key, value in written if name in own}
        if self.mtime_ns is not None:
            metadata |= _written_time(self.mtime_ns, self.form)
        if self.xattrs:
            metadata["xattr"] = _written(self.xattrs)
        return metadata

    @property
    def fits(self) -> bool:
        """True if the metadata is within S3's size limit."""
        return has_room(self.changed(mtime_ns=self.mtime_ns or 0).as_metadata())


def process_default() -> Meta:
    """Attributes for a file whose object has none: this process's user and group, mode 0644."""
    return Meta(stat.S_IFREG | 0o644, os.geteuid(), os.getegid())


def has_attributes_in(metadata: Mapping[str, str]) -> bool:
    """True if an object's metadata has POSIX attributes in one of the two forms."""
    return not _READ.isdisjoint(metadata)


def read(metadata: Mapping[str, str], default: Meta) -> Meta:
    """Read the attributes from an object's metadata; take missing ones from `default`."""
    kind = stat.S_IFMT(default.mode)
    mode = _mode(metadata.get("mode"), kind)
    if mode is None:
        mode = _octal(metadata.get("file-permissions"))
    if mode is not None and stat.S_ISLNK(mode):
        kind = stat.S_IFLNK
    permissions = default.mode & PERMISSIONS if mode is None else mode & PERMISSIONS
    uid = _whole(metadata.get("uid", metadata.get("file-owner")))
    gid = _whole(metadata.get("gid", metadata.get("file-group")))
    found = (("mode", mode), ("uid", uid), ("gid", gid))
    form = Form(0) if metadata.keys().isdisjoint(_S3FS) else Form.S3FS
    if not metadata.keys().isdisjoint(_AWS):
        form |= Form.AWS
    return Meta(
        kind | permissions,
        default.uid if uid is None else uid,
        default.gid if gid is None else gid,
        read_time(metadata),
        _read_xattrs(metadata.get("xattr")),
        tuple(pair for pair in sendable(metadata).items() if pair[0] not in _OWN),
        form or default.form,
        frozenset(name for name, value in found if value is None),
    )


def read_time(metadata: Mapping[str, str]) -> int | None:
    """Read the modification time (ns since the epoch) from metadata; None if there is none."""
    known = _time(metadata.get("mtime"))
    return known if known is not None else _aws_time(metadata.get("file-mtime"))


def dated(info: ObjectInfo, form: Form) -> dict[str, str] | None:
    """Return an object's metadata with its time; None if they have a time or can't be sent.

    The time gets the form of the attributes in the metadata, or `form` if there are none.
    """
    metadata = info.metadata or {}
    if "mtime" in metadata or "file-mtime" in metadata:
        return None
    if "file-permissions" in metadata:
        form = Form.AWS
    elif "mode" in metadata:
        form = Form.S3FS
    metadata = {**metadata, **_written_time(info.mtime_ns, form)}
    return metadata if metadata == sendable(metadata) else None


def _written_time(mtime_ns: int, form: Form) -> dict[str, str]:
    written = {}
    if Form.S3FS in form:
        seconds, rest = divmod(abs(mtime_ns), SECOND_NS)
        written["mtime"] = f"{'-' if mtime_ns < 0 else ''}{seconds}.{rest:09}"
    if Form.AWS in form:
        written["file-mtime"] = f"{mtime_ns}ns"
    return written


def _octal(text: str | None) -> int | None:
    """Read an octal mode as AWS writes it, maybe without a file type; None if it is invalid."""
    if text is None or not 0 < len(text) <= 8 or set(text) - set("01234567"):
        return None
    return int(text, 8)


def _mode(text: str | None, kind: int) -> int | None:
    """Read the mode of a file or directory; None if it is invalid.

    `kind` is the expected file type; a symlink's is accepted for a file. No text has the expected
    type both as a decimal and as an octal number, so the type tells the two apart. A number
    without a type is taken as decimal.
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
    """Read an id or a mode: a decimal number of at most 32 bits; None if it is invalid."""
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


def _aws_time(text: str | None) -> int | None:
    """Read a time as AWS writes it: nanoseconds if the text ends in "ns", else milliseconds."""
    if text is None:
        return None
    digits = text.removesuffix("ns")
    if not digits.removeprefix("-").isdecimal() or not digits.isascii() or len(digits) > 20:
        return None
    value = int(digits) * (1 if digits != text else SECOND_NS // 1000)
    return value if abs(value) <= MOST_NS else None


def _written(xattrs: tuple[tuple[str, bytes], ...]) -> str:
    values = {name: base64.b64encode(value).decode() for name, value in xattrs}
    return quote(json.dumps(values, separators=(",", ":"), ensure_ascii=False))


def _read_xattrs(text: str | None) -> tuple[tuple[str, bytes], ...]:
    if text is None:
        return ()
    try:
        values = dict(json.loads(unquote(text, errors="strict")))
        for name in values:
            name.encode()  # fails for lone surrogates, and for names that are no strings
        return tuple((name, base64.b64decode(value)) for name, value in values.items())
    except (ValueError, TypeError, AttributeError, RecursionError):
        return ()
