"""Conversion of object keys to file names and back.

A directory is a prefix that ends in `/`; its names are the parts of keys between that prefix
and the next `/`. Most keys map one to one. Keys that can't be shown as files are hidden,
and listings count them:

- an empty segment (`a//b`), `.` and `..`;
- a name of more than 255 bytes, or one with a NUL;
- `.fusefs` at the root of a bucket, where the CSI driver keeps its records;
- `.fusefs-probe`, with which mounts test the store's capabilities (this one is not counted);
- a file whose name is also a directory's (`a` beside `a/b`): the directory wins.

A name's position in its directory is `name + "/"`, for files and for directories, and entries are
ordered by position. S3 orders keys by their bytes, and so the prefixes of directories (which end in
`/`) in just this order; a file has the position of a directory of the same name, so that the
directory can hide the file.
"""

from __future__ import annotations

from fusefs.store.capabilities import PROBE_NAME

NAME_MAX = 255
# S3's limit for a key, in bytes of UTF-8.
LONGEST_KEY = 1024
PRIVATE = ".fusefs"


def split_key(key: str) -> tuple[str, str]:
    """Split a file's key into its directory's prefix and its name."""
    at = key.rfind("/") + 1
    return key[:at], key[at:]


def split_entry(key: str) -> tuple[str, str]:
    """Split a file's key, or a directory's prefix, into the parent's prefix and the name."""
    prefix = parent_of(key)
    return prefix, key[len(prefix) :].removesuffix("/")


def parent_of(key: str) -> str:
    """The prefix of the directory that contains a file, or another directory."""
    return key[: key.rfind("/", 0, -1) + 1]


def is_at_or_below(key: str, top: str) -> bool:
    """True if `key` is `top` or below it; every key is below ""."""
    return not top or key == top or key.startswith(top if top.endswith("/") else top + "/")


def is_expressible(name: str) -> bool:
    """True if this part of a key can be a file name."""
    if name in ("", ".", "..") or "\0" in name or "/" in name:
        return False
    return len(name) <= 63 or len(name.encode()) <= NAME_MAX


def is_private(prefix: str, name: str) -> bool:
    """True if a name in the directory `prefix` is reserved for fusefs itself."""
    return name == PROBE_NAME or (not prefix and name == PRIVATE)


def decode(name: bytes) -> str | None:
    """Decode a file name; None if it is not UTF-8, so that no key can have the name."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def position(name: str) -> str:
    return name + "/"
