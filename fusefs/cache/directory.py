"""The cache directory: whether it is one, of this format, and ours alone."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("fusefs.cache")

FORMAT_MARK = b"fusefs cache 1\n"
_ANY_FORMAT = re.compile(rb"fusefs cache \d+\n")
# What mounts leave to later ones, staged files above all; all else was fetched.
STATE = "mounts"
# The parts of the cache, by who reads it: see Daemon._principal_directory.
_PRINCIPAL = re.compile(r"[0-9a-f]{16}")


class CacheDirectoryError(Exception):
    """The cache directory can't be used; the message is for the user."""


@contextmanager
def usable(directory: Path) -> Iterator[None]:
    """Report what the disk refuses as a cache directory that can't be used.

    Raises:
        CacheDirectoryError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise CacheDirectoryError(
            f"can't use the cache directory {directory}: {error.strerror or error}"
        ) from error


def prepare_directory(directory: Path, *, in_any_case: bool = False) -> None:
    """Create the cache directory, or check that it is one, and ours alone. Blocks.

    A damaged mark is written anew: what is in the directory has checksums and
    formats of its own. `in_any_case` nothing is refused, for a mount that is
    served already uses the directory.

    Raises:
        CacheDirectoryError: it can't be used; the message says why.
    """
    try:
        with usable(directory):
            _prepare(directory)
    except CacheDirectoryError as error:
        if not in_any_case:
            raise
        logger.warning("%s; the mount goes on with it", error)


def _prepare(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise CacheDirectoryError(
            f"the cache directory {directory} belongs to another user (uid {status.st_uid}):"
            " choose another with --cache-dir"
        )
    mark = directory / "format"
    if mark.exists():
        _check_mark(directory, mark)
        return
    if any(not _is_harmless(entry.name) for entry in directory.iterdir()):
        raise _not_a_cache(directory)
    # Only now that it is known to be ours, and of no other use.
    directory.chmod(0o700)
    _write_mark(mark)


def _check_mark(directory: Path, mark: Path) -> None:
    found = mark.read_bytes()
    if found == FORMAT_MARK:
        return
    if _ANY_FORMAT.fullmatch(found):
        raise CacheDirectoryError(
            f"the cache directory {directory} is of another version of fusefs: remove it,"
            " or choose another with --cache-dir"
        )
    if any(not _is_ours(entry.name) for entry in directory.iterdir()):
        raise _not_a_cache(directory)
    logger.warning("%s is damaged, and is written anew", mark)
    _write_mark(mark)


def _write_mark(mark: Path) -> None:
    # Whole or not at all: this process may be killed at any moment.
    unfinished = mark.with_name(f"format.{os.getpid()}")
    unfinished.write_bytes(FORMAT_MARK)
    unfinished.replace(mark)


def _not_a_cache(directory: Path) -> CacheDirectoryError:
    return CacheDirectoryError(
        f"{directory} is not empty and no cache of fusefs: choose another with --cache-dir"
    )


def _is_harmless(name: str) -> bool:
    """Whether this may be in an empty cache directory."""
    return name == "lost+found" or name.startswith("format.")


def _is_ours(name: str) -> bool:
    """Whether this may be in a cache directory that is in use."""
    is_known = name in ("format", STATE) or _PRINCIPAL.fullmatch(name) is not None
    return is_known or _is_harmless(name)
