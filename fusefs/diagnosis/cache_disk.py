"""The disk that caches objects: which file system, how much room, how fast.

The probe writes a file without a name (so that nothing is left of a probe that
is killed), reads it back past the page cache where the file system
has O_DIRECT, and stops after a second of each.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fusefs.diagnosis.findings import Finding, advice, ok, problem, skipped
from fusefs.launch import registry
from fusefs.linux import mountinfo
from fusefs.settings.display import human_size
from fusefs.settings.mount import MountSettings
from fusefs.settings.types import FREE_INODES

PROBE_BYTES = 64 << 20
PIECE = 1 << 20
PAGE = 4096
LIMIT_S = 1.0
# A cache is to be faster than S3, which gives a connection some 50 MB/s, and
# answers within tens of milliseconds.
SLOW_BYTES_S = 200e6
SLOW_READ_S = 0.002

_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "lustre", "glusterfs")
# Of the probe, by limits and permissions: they say nothing about the disk.
_REFUSALS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE),
)


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes per second in order, and seconds for one page at a random place."""

    written: float
    read: float
    page_s: float
    is_direct: bool


def check(
    settings: MountSettings, *, is_probed: bool = True, cached_bytes: int = 0, cached_files: int = 0
) -> Iterator[Finding]:
    """All checks of the cache directory of these settings. Blocks, for three seconds at most.

    `cached_bytes` in `cached_files` are what a mount has there, and evicts when it needs room.
    """
    try:
        directory = existing(settings.cache_dir)
        is_directory = directory.is_dir()
    except OSError as error:  # of a name, or of a directory above that is closed to this user
        text = f"{settings.cache_dir}: {error.strerror}"
        yield problem("cache disk", text, "choose another --cache-dir")
        return
    if not is_directory:
        text = f"{directory} is not a directory"
        yield problem("cache disk", text, "remove it, or choose another --cache-dir")
        return
    yield _file_system(directory)
    try:
        room = os.statvfs(directory)
    except OSError as error:
        yield problem(
            "cache room",
            f"{directory}: {error.strerror}",
            "choose another --cache-dir, or repair the disk",
        )
        return
    yield _room(settings, room, cached_bytes)
    yield _inodes(settings, room, cached_files)
    if not is_probed:
        return
    if not os.access(directory, os.W_OK):
        yield skipped("cache speed", f"{directory} is not writable for this user")
        return
    yield _speed(directory, room.f_bavail * room.f_frsize)


def existing(directory: Path) -> Path:
    """The directory, or what is above it as long as it does not exist."""
    path = registry.resolve(directory)
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _file_system(directory: Path) -> Finding:
    mount = mountinfo.mount_above(directory)
    if mount is None:
        return skipped("cache disk", f"the mount of {directory} is not known")
    text = f"{directory} is on {mount.filesystem}"
    if mount.is_read_only:
        return problem("cache disk", f"{text}, read-only", "choose another --cache-dir")
    if mount.is_fusefs:
        return problem(
            "cache disk", f"{text}, a mount of fusefs", "choose a --cache-dir on a local disk"
        )
    if mount.filesystem in _REMOTE or mount.is_fuse:
        return advice(
            "cache disk",
            f"{text}, which is not a local disk",
            "choose a --cache-dir on a local disk, best NVMe",
            filesystem=mount.filesystem,
        )
    if mount.filesystem in ("tmpfs", "ramfs"):
        return advice(
            "cache disk",
            f"{text}: what is cached takes memory",
            "choose a --cache-dir on a disk, or limit it with --cache-size",
            filesystem=mount.filesystem,
        )
    return ok("cache disk", text, filesystem=mount.filesystem)


def _room(settings: MountSettings, room: os.statvfs_result, cached: int) -> Finding:
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    floor = settings.min_free.bytes_of(size)
    figures = {"size_bytes": size, "free_bytes": free, "min_free_bytes": floor}
    text = f"{human_size(free)} of {human_size(size)} free"
    if free <= floor < free + cached:
        return advice(
            "cache room",
            f"{text}; the cache ({human_size(cached)}) evicts files to keep {human_size(floor)} "
            "free (--min-free)",
            "that is how a full cache works; it evicts less on a larger or emptier disk",
            **figures,
        )
    if free <= floor:
        return problem(
            "cache room",
            f"{text}; --min-free keeps {human_size(floor)} free, so nothing more is cached",
            "free disk space, use another disk (--cache-dir), or lower --min-free",
            **figures,
        )
    if settings.cache_size is not None and settings.cache_size > size - floor:
        return advice(
            "cache room",
            f"{text}; --cache-size is {human_size(settings.cache_size)}, more than there is",
            "lower --cache-size, or use a larger disk",
            **figures,
        )
    return ok("cache room", f"{text}, {human_size(floor)} of it stay free", **figures)


def _inodes(settings: MountSettings, room: os.statvfs_result, cached: int) -> Finding:
    if not room.f_files:  # btrfs and others make inodes as they are needed
        return ok("cache inodes", "the file system has no fixed number")
    floor = FREE_INODES.bytes_of(room.f_files)
    text = f"{room.f_favail:,} of {room.f_files:,} free"
    figures = {"inodes": room.f_files, "free_inodes": room.f_favail}
    if room.f_favail <= floor < room.f_favail + cached:
        return advice(
            "cache inodes",
            f"{text}; the cache ({cached:,} files) evicts files to keep {floor:,} free",
            "make the disk's file system with more inodes, so that it evicts less",
            **figures,
        )
    if room.f_favail <= floor:
        return problem(
            "cache inodes",
            f"{text}; the cache keeps {floor:,} free, so nothing more is cached",
            "remove files from that disk, or make its file system with more inodes",
            **figures,
        )
    return ok("cache inodes", text, **figures)


def _speed(directory: Path, free: int) -> Finding:
    size = min(PROBE_BYTES, free // 4) // PIECE * PIECE
    if not size:
        return skipped("cache speed", "there is no room for a probe")
    try:
        speed = measure(directory, size)
    except OSError as error:
        if error.errno in _REFUSALS:
            return skipped("cache speed", f"the probe was refused: {error.strerror}")
        return problem(
            "cache speed",
            f"the disk fails: {error.strerror}",
            "see the kernel's log (dmesg), and replace the disk or choose another --cache-dir",
        )
    past = "" if speed.is_direct else " (through the page cache)"
    text = (
        f"writes {speed.written / 1e6:,.0f} MB/s, reads {speed.read / 1e6:,.0f} MB/s, "
        f"{PAGE} bytes at random in {speed.page_s * 1e3:.2f} ms{past}"
    )
    figures = {
        "write_bytes_per_second": speed.written,
        "read_bytes_per_second": speed.read,
        "random_read_seconds": speed.page_s,
        "is_direct": speed.is_direct,
    }
    if min(speed.written, speed.read) < SLOW_BYTES_S or speed.page_s > SLOW_READ_S:
        return advice(
            "cache speed",
            text,
            "first reads are limited by this disk: use a faster one (NVMe) as --cache-dir, "
            "or end what else uses it (iostat -x 1)",
            **figures,
        )
    return ok("cache speed", text, **figures)


def measure(directory: Path, size: int) -> DiskSpeed:
    """Write and read a file of `size` bytes, a multiple of PIECE. Blocks.

    Raises:
        OSError: the disk refuses.
    """
    with tempfile.TemporaryFile(dir=directory, prefix=".fusefs-", buffering=0) as file:
        written = _write(file.fileno(), size)
        reader, is_direct = _reader(file.fileno())
        try:
            return DiskSpeed(written, _read(reader, size), _read_pages(reader, size), is_direct)
        finally:
            os.close(reader)


def _write(fd: int, size: int) -> float:
    piece = random.randbytes(PIECE)  # some disks are quick at zeros
    began = time.monotonic()
    for offset in range(0, size, PIECE):
        os.pwrite(fd, piece, offset)
    os.fdatasync(fd)
    return size / max(1e-9, time.monotonic() - began)


def _reader(fd: int) -> tuple[int, bool]:
    """A descriptor that reads past the page cache, if the file system has that."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    path = f"/proc/self/fd/{fd}"
    with contextlib.suppress(OSError):
        reader = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            os.preadv(reader, [mmap.mmap(-1, PAGE)], 0)
            return reader, True
        except OSError:
            os.close(reader)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False


def _read(fd: int, size: int) -> float:
    buffer = mmap.mmap(-1, PIECE)  # aligned, which O_DIRECT needs
    began, done = time.monotonic(), 0
    while done < size and time.monotonic() - began < LIMIT_S:
        done += os.preadv(fd, [buffer], done)
    return done / max(1e-9, time.monotonic() - began)


def _read_pages(fd: int, size: int) -> float:
    """The median of the seconds that reads of a page at random places take."""
    buffer = mmap.mmap(-1, PAGE)
    taken: list[float] = []
    end = time.monotonic() + LIMIT_S / 2
    while not taken or (time.monotonic() < end and len(taken) < 2000):
        began = time.monotonic()
        os.preadv(fd, [buffer], random.randrange(size // PAGE) * PAGE)
        taken.append(time.monotonic() - began)
    return sorted(taken)[len(taken) // 2]
