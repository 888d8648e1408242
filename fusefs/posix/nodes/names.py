"""Object keys to file names and back.

A directory is a prefix that ends in `/`; the names in it are what stands
between that prefix and the next `/`. Most keys map one to one. Those that no
file name can express are hidden, and counted by whoever lists them:

- an empty segment (`a//b`), `.` and `..`;
- a name of more than 255 bytes, or one with a NUL;
- `.fusefs` at the root of a bucket, where the CSI driver keeps its records;
- `.fusefs-probe`, where mounts try what the store honours (these are not counted);
- a file whose name is also a directory's (`a` beside `a/b`): the directory wins.

Directory positions: entries are ordered by `name + "/"`, whether they are
files or directories. S3 orders keys by their bytes, hence directories (which
end in `/`) in just this order, and it makes a file stand where a directory of
the same name would, so that one of the two can hide the other.
"""

from __future__ import annotations

from fusefs.store.capabilities import PROBE_NAME

NAME_MAX = 255
# What S3 takes, in bytes of UTF-8.
LONGEST_KEY = 1024
PRIVATE = ".fusefs"


def split_key(key: str) -> tuple[str, str]:
    """The prefix of the directory that a file's key is in, and the file's name there."""
    at = key.rfind("/") + 1
    return key[:at], key[at:]


def split_entry(key: str) -> tuple[str, str]:
    """As `split_key`, also of a directory by its own prefix."""
    prefix = parent_of(key)
    return prefix, key[len(prefix) :].removesuffix("/")


def parent_of(key: str) -> str:
    """The prefix of the directory that a file, or another directory, is in."""
    return key[: key.rfind("/", 0, -1) + 1]


def is_at_or_below(key: str, top: str) -> bool:
    """True if a key is this one or below it; each is below ""."""
    return not top or key == top or key.startswith(top if top.endswith("/") else top + "/")


def is_expressible(name: str) -> bool:
    """True if a file name can stand for this segment of a key."""
    if not name or name in (".", ".."):
        return False
    if "\0" in name or "/" in name:
        return False
    return len(name) <= 63 or len(name.encode()) <= NAME_MAX


def is_private(prefix: str, name: str) -> bool:
    """True if a name in the directory of this prefix is not for the users of the bucket."""
    return name == PROBE_NAME or (not prefix and name == PRIVATE)


def decode(name: bytes) -> str | None:
    """The segment of a key that a file name stands for; None if no key can hold it."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def position(name: str) -> str:
    return name + "/"
