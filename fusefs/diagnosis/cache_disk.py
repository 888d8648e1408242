"""Checks of the cache disk: its file system, free space and speed."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fusefs.diagnosis.findings import Finding, advice, ok, problem, skipped
from fusefs.launch import registry
from fusefs.launch.users import existing
from fusefs.linux import mountinfo
from fusefs.settings.display import human_size
from fusefs.settings.mount import MountSettings
from fusefs.settings.types import FREE_INODES

PROBE_BYTES = 64 << 20
PIECE = 1 << 20
# The speed below which there is advice: S3 alone gives some 50 MB/s for each connection.
SLOW_BYTES_S = 200e6

_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "lustre", "glusterfs")


def check(
    settings: MountSettings, *, cached_bytes: int = 0, cached_files: int = 0
) -> Iterator[Finding]:
    """Check the disk of the settings' cache directory. Blocks while the disk is measured.

    A mount's cache has `cached_bytes` in `cached_files`, which the mount can evict for space.
    """
    try:
        directory = existing(registry.resolve(settings.cache_dir))
        room = os.statvfs(directory)
    except OSError as error:  # a bad name, or a directory above that this user may not search
        text = f"{settings.cache_dir}: {error.strerror}"
        yield problem("cache disk", text, "choose another --cache-dir, or repair the disk")
        return
    if not directory.is_dir():
        text = f"{directory} is not a directory"
        yield problem("cache disk", text, "remove it, or choose another --cache-dir")
        return
    yield _file_system(directory)
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    yield _room(
        "cache room",
        free,
        size,
        settings.min_free.bytes_of(size),
        cached_bytes,
        human_size,
        "free disk space, use a larger disk (--cache-dir), or lower --min-free",
    )
    if room.f_files:  # btrfs and others make inodes on demand
        yield _room(
            "cache inodes",
            room.f_favail,
            room.f_files,
            FREE_INODES.bytes_of(room.f_files),
            cached_files,
            "{:,}".format,
            "remove files from that disk, or make its file system with more inodes",
        )
    if free > 4 * PROBE_BYTES:
        yield _speed(directory)


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


def _room(
    check: str,
    free: int,
    total: int,
    floor: int,
    cached: int,
    shown: Callable[[int], str],
    what_to_do: str,
) -> Finding:
    """Judge `free` bytes or inodes: `floor` must stay free, eviction can free `cached`."""
    text = f"{shown(free)} of {shown(total)} free"
    figures = {"total": total, "free": free, "stays_free": floor}
    if free > floor:
        return ok(check, f"{text}, {shown(floor)} of it stay free", **figures)
    text += f"; {shown(floor)} have to stay free, "
    if free + cached > floor:
        text += f"for which the cache ({shown(cached)}) evicts files"
        return advice(check, text, what_to_do, **figures)
    return problem(check, f"{text}so nothing more is cached", what_to_do, **figures)


def _speed(directory: Path) -> Finding:
    """Measure the speed of writing and reading a temporary file, without the page cache."""
    piece = random.randbytes(PIECE)  # because some disks are fast with zeros
    offsets = range(0, PROBE_BYTES, PIECE)
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            began = time.monotonic()
            for offset in offsets:
                os.pwrite(file.fileno(), piece, offset)
            os.fdatasync(file.fileno())
            written = PROBE_BYTES / (time.monotonic() - began)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.monotonic()
            for offset in offsets:
                os.pread(file.fileno(), PIECE, offset)
            read = PROBE_BYTES / (time.monotonic() - began)
    except OSError as error:  # may be about limits or permissions, not about the disk
        return skipped("cache speed", f"it can't be measured: {error.strerror}")
    text = f"writes {written / 1e6:,.0f} MB/s, reads {read / 1e6:,.0f} MB/s"
    figures = {"write_bytes_per_second": written, "read_bytes_per_second": read}
    if min(written, read) > SLOW_BYTES_S:
        return ok("cache speed", text, **figures)
    what = "first reads are limited by this disk: use a faster one (NVMe) as --cache-dir"
    return advice("cache speed", text, what, **figures)
