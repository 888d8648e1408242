"""Disks that fail: each an ext4 on a loop device, whose image is memory.

The image of a failing disk is cut off, and sealed against growing then. Without the seal
it would grow again with the first block that is written behind its end, and what lies
before that block would be read as zeros then.

A disk with a power cut is shut down by the kernel, which writes no more of its journal.
"""

import array
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SIZE = 96 << 20
BLOCK = 4096
FIBMAP = 1  # include/uapi/linux/fs.h
# include/uapi/linux/fs.h: _IOR('X', 125, __u32)
FS_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


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


@dataclass
class CutDisk:
    """The mounted disk; it has a journal, as disks of machines have."""

    path: Path
    _image: str
    _undo: ExitStack

    def cut_power(self) -> None:
        """Lose what is not on the disk yet, and come back as after a restart of the machine.

        It comes back on another device: a mount namespace that some other process has made
        meanwhile may hold the dead file system still, which this one would be then.
        """
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, FS_IOC_SHUTDOWN, array.array("I", [NO_LOG_FLUSH]))
        finally:
            os.close(fd)
        subprocess.run(["umount", "-l", self.path], check=True)
        device = self._undo.enter_context(_attached(self._image))
        subprocess.run(["mount", device, self.path], check=True)


@contextmanager
def failing_disk(directory: Path) -> Iterator[FailingDisk]:
    """Such a disk below a directory; the test is skipped where there are no loop devices."""
    # Without a journal, whose blocks would be among the first to fail.
    with _loop_disk(directory, "-O", "^has_journal") as (path, memory):
        yield FailingDisk(path, memory)


@contextmanager
def cut_disk(directory: Path) -> Iterator[CutDisk]:
    """Such a disk below a directory; the test is skipped where there are no loop devices."""
    with ExitStack() as devices, _loop_disk(directory) as (path, memory):
        yield CutDisk(path, _image(memory), devices)


@contextmanager
def _loop_disk(directory: Path, *options: str) -> Iterator[tuple[Path, int]]:
    """A file system, mounted: its path and its image."""
    if os.geteuid() != 0:
        pytest.skip("a loop device needs root")
    for program in ("losetup", "mkfs.ext4"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    path = directory / "disk"
    memory = os.memfd_create("image", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, SIZE)
        with _mounted(memory, path, options):
            yield path, memory
    finally:
        os.close(memory)


def _image(memory: int) -> str:
    return f"/proc/{os.getpid()}/fd/{memory}"


@contextmanager
def _mounted(memory: int, path: Path, options: tuple[str, ...]) -> Iterator[None]:
    image = _image(memory)
    subprocess.run(["mkfs.ext4", "-q", "-b", str(BLOCK), "-m", "0", *options, image], check=True)
    with _attached(image) as device:
        path.mkdir()
        mounted = subprocess.run(["mount", device, path], check=False, capture_output=True)
        if mounted.returncode:
            pytest.skip("this container may not mount a loop device")
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", path], check=True)


@contextmanager
def _attached(image: str) -> Iterator[str]:
    """A loop device of an image; it goes with the last mount of it."""
    attached = subprocess.run(
        ["losetup", "--find", "--show", image], check=False, capture_output=True, text=True
    )
    if attached.returncode:
        pytest.skip(f"no loop device: {attached.stderr.strip()}")
    device = attached.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
