"""Atomic replacement of files, fsync, file locks, and descriptors that are closed again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from stat import S_IWOTH

TYPE_CHECKING = False  # typing itself is not imported: it is large
if TYPE_CHECKING:
    from pathlib import Path


def absolute(path: Path) -> Path:
    """Return the absolute path; raises OSError if `path` needs a working directory that is gone."""
    if path.is_absolute():
        return path
    try:
        return path.cwd() / path
    except FileNotFoundError:
        text = "the working directory is not there any more; change to another"
        raise OSError(errno.ENOENT, text, str(path)) from None


def open_in_place(path: Path, flags: int) -> int:
    """Open a path; root follows no symbolic link that a user may have made. Raises OSError."""
    flags |= os.O_CLOEXEC
    shared = [at for at in path.parents if (found := at.stat()).st_uid or found.st_mode & S_IWOTH]
    if os.geteuid() or not shared:
        return os.open(path, flags, 0o600)
    # Only root can have made links at the topmost of them, such as /home or /scratch, and above.
    place = os.path.join(os.path.realpath(shared[-1]), path.parent.relative_to(shared[-1]))
    with closing(os.open(path.parent, os.O_PATH | os.O_CLOEXEC)) as directory:
        if os.readlink(f"/proc/self/fd/{directory}") != os.path.normpath(place):
            raise PermissionError(errno.EPERM, "a user may have put a symbolic link into its path")
        return os.open(path.name, flags | os.O_NOFOLLOW, 0o600, dir_fd=directory)


def replace(
    path: str | os.PathLike[str],
    content: str | bytes,
    *,
    mode: int = 0o600,
    owner: int | None = None,
    is_durable: bool = False,
    suffix: str = ".new",
) -> None:
    """Replace a file's content atomically. Blocks.

    The new content is written to `path` + `suffix`, then renamed. Processes that may write at the
    same time need different suffixes. A file that an earlier writer left under that name is removed
    first, so that no link is followed. `owner` is the uid and gid of the new file. With
    `is_durable`, content and path are on the disk when this returns.

    Raises:
        OSError: the new content can't be written; the old content is still there.
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
    """Sync a directory and all directories above it on the same file system. Blocks.

    A parent that this user may not read was not made by this user, and is skipped.

    Raises:
        OSError: the disk refuses.
    """
    sync(path)
    path, device = os.path.abspath(path), os.stat(path).st_dev
    while path != (path := os.path.dirname(path)) and os.stat(path).st_dev == device:
        with contextlib.suppress(PermissionError):
            sync(path)


def sync(path: str | os.PathLike[str]) -> None:
    """Call fsync for a file or directory; raises OSError. Blocks."""
    with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)


@contextlib.contextmanager
def opened_below(directory: str | os.PathLike[str], *below: str) -> Iterator[int]:
    """Yield a descriptor of a directory `below` another; no link below `directory` is followed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(directory, flags & ~os.O_NOFOLLOW)
    try:
        for name in below:
            above, fd = fd, os.open(name, flags, dir_fd=fd)
            os.close(above)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Yield an open descriptor, and close it at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Take an exclusive lock of an open file or directory; False if another holder has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
