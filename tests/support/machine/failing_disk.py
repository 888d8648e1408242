"""A disk that fails: an ext4 on a loop device, whose image is cut off.

The image is memory, which is sealed against growing once it is cut off. Without the seal
it would grow again with the first block that is written behind its end, and what lies
before that block would be read as zeros then.
"""

from __future__ import annotations

import array
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SIZE = 96 << 20
BLOCK = 4096
FIBMAP = 1  # include/uapi/linux/fs.h


@dataclass
class FailingDisk:
    """The mounted disk; what is behind the end of its image can't be read or written."""

    path: Path
    _image: int

    def fail(self, *files: Path, is_writable: bool = False) -> None:
        """Have nothing of these files read any more, nor what lies behind them on the disk.

        With `is_writable` new blocks can be written, and those before them become zeros.
        """
        os.sync()
        starts = []
        for file in files:
            fd = os.open(file, os.O_RDONLY)
            for index in range(-(-os.fstat(fd).st_size // BLOCK)):
                number = array.array("i", [index])
                fcntl.ioctl(fd, FIBMAP, number)
                starts.append(number[0])
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        os.ftruncate(self._image, min(start for start in starts if start) * BLOCK)
        if not is_writable:
            fcntl.fcntl(self._image, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)


@contextmanager
def failing_disk(directory: Path) -> Iterator[FailingDisk]:
    """Such a disk below a directory; the test is skipped where there are no loop devices."""
    if os.geteuid() != 0:
        pytest.skip("a loop device needs root")
    for program in ("losetup", "mkfs.ext4"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    path = directory / "disk"
    memory = os.memfd_create("image", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, SIZE)
        with _mounted(memory, path):
            yield FailingDisk(path, memory)
    finally:
        os.close(memory)


@contextmanager
def _mounted(memory: int, path: Path) -> Iterator[None]:
    """Its file system, mounted."""
    image = f"/proc/{os.getpid()}/fd/{memory}"
    # Without a journal, whose blocks would be among the first to fail.
    subprocess.run(
        ["mkfs.ext4", "-q", "-b", str(BLOCK), "-m", "0", "-O", "^has_journal", image], check=True
    )
    attached = subprocess.run(
        ["losetup", "--find", "--show", image], check=False, capture_output=True, text=True
    )
    if attached.returncode:
        pytest.skip(f"no loop device: {attached.stderr.strip()}")
    device = attached.stdout.strip()
    try:
        path.mkdir()
        mounted = subprocess.run(["mount", device, path], check=False, capture_output=True)
        if mounted.returncode:
            pytest.skip("this container may not mount a loop device")
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", path], check=True)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
