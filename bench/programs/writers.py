"""The writers: the functions that do the timed writing, in their own process.

Started as `python -m bench.programs.writers SPEC`, with SPEC as for the readers. The contents are
made from a seed, so that any process can compute what the bucket ought to have: a pool of random
bytes, of which each block is another part. Times run from before the open to after the close.

The `check_…` operations compare the bucket's contents with what was written. Run right after a
writer has ended, they show if close has waited for the uploads.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.programs.readers import MIB, Result, main, open_store
from bench.programs.together import by_tasks

POOL_SIZE = 64 * MIB
# Odd, so that no two blocks of a large file are the same.
STEP = 1_000_003
PUTS_AT_A_TIME = 16


class NotStoredError(Exception):
    """The bucket does not have the written contents."""


class Content:
    """The bytes of large and small files, made from a seed."""

    def __init__(self, seed: int) -> None:
        self._pool = memoryview(random.Random(seed).randbytes(POOL_SIZE))

    def block(self, number: int, size: int) -> memoryview:
        start = number * STEP % (POOL_SIZE - size)
        return self._pool[start : start + size]

    def blocks(self, size: int) -> Iterator[memoryview]:
        """Return the blocks of a large file, of 1 MiB each."""
        return (self.block(number, MIB) for number in range(size // MIB))


def write_file(path: str, size: int, seed: int, sync: bool = False) -> Result:
    """Write a new file in 1 MiB writes, fsync it with `sync`, and close it."""
    content = Content(seed)
    start = time.monotonic()
    with open(path, "wb", buffering=0) as file:
        for block in content.blocks(size):
            if file.write(block) != len(block):
                raise NotStoredError(f"{path}: a write was cut short")
        if sync:
            os.fsync(file.fileno())
    return {"seconds": [time.monotonic() - start], "bytes": size}


def write_files(root: str, files: int, size: int, threads: int, seed: int) -> Result:
    """Write many small files into a new directory, one task per file."""
    content = Content(seed)
    os.mkdir(root)

    def write(name: str) -> int:
        with open(f"{root}/{name}", "wb") as file:
            return file.write(content.block(int(name), size))

    return {"seconds": [by_tasks(_names(files), threads, write, size)], "files": files}


def rename(source: str, target: str, files: int) -> Result:
    """Rename a directory that has `files` files."""
    start = time.monotonic()
    os.rename(source, target)
    return {"seconds": [time.monotonic() - start], "files": files}


def make_files(root: str, archive: str, files: int, size: int, seed: int) -> Result:
    """Make a local directory of files, and a tar archive of it."""
    content = Content(seed)
    os.makedirs(root)
    for name in _names(files):
        with open(f"{root}/{name}", "wb") as file:
            file.write(content.block(int(name), size))
    with tarfile.open(archive, "w") as tar:
        tar.add(root, arcname=".")
    return {}


def run(command: list[str], files: int) -> Result:
    """Run a program that makes or removes `files` files.

    Raises:
        CalledProcessError: the program failed.
    """
    start = time.monotonic()
    subprocess.run(command, check=True)
    return {"seconds": [time.monotonic() - start], "files": files}


def put_file(
    store: dict[str, str], path: str, key: str, part_size: int, parts_at_a_time: int
) -> Result:
    """Upload a local file with obstore."""
    import obstore

    s3 = open_store(store)
    start = time.monotonic()
    obstore.put(s3, key, Path(path), chunk_size=part_size, max_concurrency=parts_at_a_time)
    return {"seconds": [time.monotonic() - start], "bytes": os.stat(path).st_size}


def put_objects(
    store: dict[str, str],
    prefix: str,
    files: int,
    size: int,
    threads: int,
    seed: int,
    metadata: dict[str, str] | None = None,
) -> Result:
    """Write the same as `write_files`, with obstore in place of a file system."""
    import obstore

    s3 = open_store(store)
    content = Content(seed)

    def put(name: str) -> int:
        data = bytes(content.block(int(name), size))
        obstore.put(s3, f"{prefix}/{name}", data, attributes=metadata)
        return len(data)

    return {"seconds": [by_tasks(_names(files), threads, put, size)], "files": files}


def check_file(store: dict[str, str], key: str, size: int, seed: int) -> Result:
    """Compare an object with the contents of `write_file`."""
    import obstore

    s3 = open_store(store)
    found = obstore.head(s3, key)["size"]
    if found != size:
        raise NotStoredError(f"the bucket has {found} of {size} bytes of {key}")
    wanted, digest = hashlib.sha256(), hashlib.sha256()
    for block in Content(seed).blocks(size):
        wanted.update(block)
    for data in obstore.get(s3, key).stream(min_chunk_size=MIB):
        digest.update(data)
    if digest.digest() != wanted.digest():
        raise NotStoredError(f"{key} has other bytes than were written")
    return {}


def check_files(store: dict[str, str], prefix: str, files: int, size: int, seed: int) -> Result:
    """Compare objects with the contents of `write_files`."""
    import obstore

    s3 = open_store(store)
    _check_names(s3, prefix, files, size)
    content = Content(seed)

    def check(name: str) -> None:
        if bytes(obstore.get(s3, f"{prefix}/{name}").bytes()) != content.block(int(name), size):
            raise NotStoredError(f"{prefix}/{name} has other bytes than were written")

    with ThreadPoolExecutor(PUTS_AT_A_TIME) as pool:
        list(pool.map(check, _names(files)))
    return {}


def check_renamed(store: dict[str, str], source: str, target: str, files: int, size: int) -> Result:
    """Check that no file is left under the old prefix, and all are under the new one."""
    s3 = open_store(store)
    _check_names(s3, source, 0, size)
    _check_names(s3, target, files, size)
    return {}


def check_removed(store: dict[str, str], prefix: str) -> Result:
    """Check that no file is left under a prefix."""
    _check_names(open_store(store), prefix, 0, 0)
    return {}


def _check_names(s3: Any, prefix: str, files: int, size: int) -> None:
    import obstore

    listed = [entry for page in obstore.list(s3, f"{prefix}/") for entry in page]
    # Directories may have objects of their own.
    found = {entry["path"]: entry["size"] for entry in listed if entry["size"]}
    if found != {f"{prefix}/{name}": size for name in _names(files)}:
        raise NotStoredError(f"the bucket has {len(found)} of {files} files of {prefix}")


def _names(files: int) -> list[str]:
    return [f"{number:05}" for number in range(files)]


if __name__ == "__main__":
    main(
        write_file,
        write_files,
        rename,
        make_files,
        run,
        put_file,
        put_objects,
        check_file,
        check_files,
        check_renamed,
        check_removed,
    )
