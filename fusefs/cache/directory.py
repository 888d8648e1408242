"""The cache directory: whether it is one, of this format, and ours alone."""

from __future__ import annotations

import os
from pathlib import Path

FORMAT_MARK = "fusefs cache 1\n"


class CacheDirectoryError(Exception):
    """The cache directory can't be used; the message is for the user."""


def prepare_directory(directory: Path) -> None:
    """Create the cache directory, or check that it is one, and ours alone. Blocks.

    Raises:
        CacheDirectoryError: it can't be used; the message says why.
    """
    mark = directory / "format"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.geteuid():
            raise CacheDirectoryError(
                f"the cache directory {directory} belongs to another user (uid {status.st_uid}):"
                " choose another with --cache-dir"
            )
        if mark.exists():
            if mark.read_text() != FORMAT_MARK:
                raise CacheDirectoryError(
                    f"the cache directory {directory} is damaged or of another version: remove it"
                )
            return
        if any(not _is_harmless(entry.name) for entry in directory.iterdir()):
            raise CacheDirectoryError(
                f"{directory} is not empty and no cache of fusefs: choose another with --cache-dir"
            )
        # Only now that it is known to be ours, and nobody else's.
        directory.chmod(0o700)
        # Whole or not at all: this process may be killed at any moment.
        unfinished = directory / f"format.{os.getpid()}"
        unfinished.write_text(FORMAT_MARK)
        unfinished.replace(mark)
    except OSError as error:
        raise CacheDirectoryError(
            f"can't use the cache directory {directory}: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise CacheDirectoryError(
            f"the cache directory {directory} is damaged: remove it"
        ) from error


def _is_harmless(name: str) -> bool:
    """Whether this may be in an empty cache directory."""
    return name == "lost+found" or name.startswith("format.")
