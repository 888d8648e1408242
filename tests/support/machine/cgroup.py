"""A memory cgroup for other processes, of either version."""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION_1 = Path("/sys/fs/cgroup/memory")
VERSION_2 = Path("/sys/fs/cgroup")


class MemoryGroup:
    """One group; processes are put in by pid, and limited together."""

    def __init__(self, path: Path, limit_name: str) -> None:
        self._path = path
        self._limit_name = limit_name

    def add(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            (self._path / "cgroup.procs").write_text(str(pid))

    def limit(self, size: int) -> None:
        """Allow `size` bytes; what is used beyond is taken back, or somebody is killed."""
        with contextlib.suppress(OSError):  # EBUSY: that much can't be taken back at once
            (self._path / self._limit_name).write_text(str(size))


@contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup | None]:
    """A new group, None where there are none or they are not ours to make."""
    if VERSION_1.is_dir():
        parent, limit = VERSION_1, "memory.limit_in_bytes"
    else:
        parent, limit = VERSION_2, "memory.max"
    path = parent / f"{name}-{os.getpid()}"
    try:
        path.mkdir()
    except OSError:
        yield None
        return
    try:
        yield MemoryGroup(path, limit) if (path / limit).exists() else None
    finally:
        deadline = time.monotonic() + 10
        while path.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.rmdir(path)
            time.sleep(0.05)
