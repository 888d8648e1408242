"""Mounts and buckets for a whole module, and contents that tell where they come from."""

import contextlib
import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounting import Mount, Mounter
from tests.support.servers.buckets import Bucket

# How long a test waits for what must happen, on a machine that others use too.
PATIENCE_S = 60
BLOCK = 4096
# The two ways in which a file is read, as options of a mount.
KINDS = {"passthrough": (), "served": ("--passthrough", "off")}


def content(name: str, size: int) -> bytes:
    """Bytes that look random and are the same at each call; they repeat after a prime number."""
    part = random.Random(name).randbytes(min(size, 65_521))
    return (part * (size // 65_521 + 1))[:size]


def stamped(version: int, size: int) -> bytes:
    """Blocks that each tell the version and their place: a mix of versions shows."""
    blocks = (b"%-32d%-32d" % (version, number) for number in range(-(-size // BLOCK)))
    return b"".join(block.ljust(BLOCK, b".") for block in blocks)[:size]


def version_of(data: bytes) -> int:
    """The version that a stamped content is, whole and unmixed."""
    version = int(data[:32])
    assert data == stamped(version, len(data)), "not one version"
    return version


def in_storms(name: str, ordinary: object, storm: object) -> pytest.MarkDecorator:
    """Run the test with a value of the argument `name`, and with another under `make storm`."""
    return pytest.mark.parametrize(name, [ordinary, pytest.param(storm, marks=pytest.mark.storm)])


def skip_without_fuse() -> None:
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse here")


@contextlib.contextmanager
def mounting(bucket: Bucket, directory: Path) -> Iterator[Mounter]:
    """Mounts below a directory, gone at the end whatever happened. Skips without /dev/fuse.

    `mounter("--option", …, prefix="a/", endpoint_url=…)` mounts the bucket, if no other is given,
    with variables `more` in its environment.
    """
    skip_without_fuse()
    mounts: list[Mount] = []

    def mount(
        *options: str,
        prefix: str = "",
        endpoint_url: str | None = None,
        cache: str = "cache",
        bucket: Bucket = bucket,
        **more: str,
    ) -> Mount:
        path = directory / f"mnt{len(mounts)}"
        path.mkdir()
        new = Mount(
            f"s3://{bucket.name}/{prefix}",
            path,
            directory / cache,
            endpoint_url or bucket.server.endpoint_url,
            bucket.server.environment | more,
            directory / f"fusefs{len(mounts)}.log",
            options,
        )
        mounts.append(new)
        new.start()
        return new

    try:
        yield mount
    finally:
        for made in mounts:
            made.clean_up()


def with_passthrough(mount: Mount) -> Mount:
    """The mount; the test is skipped where the kernel can't read cached files by itself."""
    state = mount.status()["passthrough"]
    if not state["on"]:
        pytest.skip(f"no passthrough: {state['why']}")
    return mount


def drop_copies(kept: Path | str = "//") -> str:
    """First in a mount namespace: its private copies of other tests' mounts would keep them alive.

    Copies below `kept` stay.
    """
    chosen = f'/ - fuse.fusefs / && !/ shared:/ && index($5, "{kept}") != 1'
    copies = f"awk '{chosen} {{print $5}}' /proc/self/mountinfo"
    return f"{copies} | xargs -r umount -c -l 2> /dev/null || true; "  # some end meanwhile


@contextlib.contextmanager
def shared_mount(directory: Path) -> Iterator[None]:
    """What is unmounted below a directory goes from the namespaces that have copies, too."""
    subprocess.run(["mount", "--bind", directory, directory], check=True)
    try:
        subprocess.run(["mount", "--make-shared", directory], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A Python process that runs some code."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def read_all(path: Path | str, size: int = 1 << 20) -> bytes:
    """The file's bytes by read(2) alone."""
    fd = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(fd, size):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def error_of(call: Callable[[], object]) -> int | None:
    """The errno that a call fails with; None if it does not."""
    try:
        call()
    except OSError as error:
        return error.errno
    return None


def read_or_stale(fd: int, size: int, offset: int) -> bytes | None:
    """What pread says; None for ESTALE, and nothing else is allowed."""
    try:
        return os.pread(fd, size, offset)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return None


PAGE = 4096
# What else may come to a daemon meanwhile: forgets, and whoever looks at the mount.
FEW = 5


def requests(mount: Mount) -> int:
    total: int = mount.status()["requests"]["total"]
    return total


def read_by_page(fd: int) -> bytes:
    """All of a file, read page by page, of which none is in the page cache."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return b"".join(os.pread(fd, PAGE, at) for at in range(0, os.fstat(fd).st_size, PAGE))


def is_passthrough(mount: Mount, fd: int) -> bool:
    """True if reads through a descriptor don't reach the daemon. Reads all of the file."""
    pages = os.fstat(fd).st_size // PAGE
    assert pages > 10 * FEW, "too small to tell"
    before = requests(mount)
    read_by_page(fd)
    sent = requests(mount) - before
    assert sent <= FEW or sent >= pages // 2, f"{sent} requests for {pages} pages"
    return sent <= FEW
