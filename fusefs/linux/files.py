"""Files that appear whole or not at all, and locks of files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from pathlib import Path


def absolute(path: Path) -> Path:
    """`path` from the root on; raises OSError if the working directory that it needs is gone."""
    if path.is_absolute():
        return path
    try:
        return path.cwd() / path
    except FileNotFoundError:
        text = "the working directory is not there any more; change to another"
        raise OSError(errno.ENOENT, text, str(path)) from None


def replace(
    path: str | os.PathLike[str],
    content: str | bytes,
    *,
    mode: int = 0o600,
    owner: int | None = None,
    is_durable: bool = False,
    suffix: str = ".new",
) -> None:
    """Give a file this content, in one step for its readers. Blocks.

    It is written beside its place, under its name with `suffix`: where several
    processes may write at the same time, each has a suffix of its own. What an
    earlier writer left there is removed, so that no link is followed. With an
    `owner` the file is that user's and group's. With `is_durable` the content is
    on the disk when this returns, and so is the path.

    Raises:
        OSError: the disk does not take it; the earlier content is still there.
    """
    data = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    path = os.fspath(path)
    unfinished = path + suffix
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unfinished)
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)  # whatever the umask is
            if owner is not None:
                os.fchown(fd, owner, owner)
            file.write(data)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.rename(unfinished, path)
    except OSError:
        os.unlink(unfinished)
        raise
    if is_durable:
        sync_directory(os.path.dirname(path))


def sync_directory(path: str) -> None:
    """Have the names of a directory on the disk, and its own path on its file system. Blocks.

    A directory above that this user may not read was not made by this user: it is passed over.

    Raises:
        OSError: the disk refuses.
    """
    sync(path)
    path, device = os.path.abspath(path), os.stat(path).st_dev
    while path != (path := os.path.dirname(path)) and os.stat(path).st_dev == device:
        with contextlib.suppress(PermissionError):
            sync(path)


def sync(path: str | os.PathLike[str]) -> None:
    """Have a file, or the names of a directory, on the disk; raises OSError. Blocks."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Lock an open file or directory against other processes; False if one has it locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
