"""Readers that read like loaders of data and models: in parallel, scattered, mapped.

Started as `python -m bench.programs.loaders SPEC`, with SPEC as for the readers.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.programs.readers import KIB, MIB, Result, main, open_store, read_range, read_whole
from bench.programs.together import ShortReadError, by_threads, run_together

BLOCK = 128 * KIB
# The sizes of a model's tensors: from norms and biases to embeddings.
SMALLEST_TENSOR = 16 * KIB
LARGEST_TENSOR = 32 * MIB


def shards(paths: list[str], size: int) -> Result:
    """Read files at the same time, each in its own process in 1 MiB reads."""

    def read(number: int) -> None:
        with open(paths[number], "rb", buffering=0) as file:
            read_range(file, 0, size)

    return {"seconds": [run_together(len(paths), read)], "bytes": size * len(paths)}


def shares(path: str, size: int, threads: int, passes: int = 1, warm_up: bool = False) -> Result:
    """Read a file in 1 MiB reads with threads of one process, each with its share of the file."""
    share = size // threads

    def read(mine: Sequence[str]) -> None:
        with open(path, "rb", buffering=0) as file:
            for start in map(int, mine):
                read_range(file, start, start + share)

    starts = [str(number * share) for number in range(threads)]
    seconds = [by_threads(starts, threads, read) for _ in range(passes + warm_up)]
    return {"seconds": seconds[warm_up:], "bytes": share * threads}


def scattered(path: str, size: int, readers: int, reads: int) -> Result:
    """Read blocks of 128 KiB at random offsets, none twice, with several processes."""
    offsets = _scattered_offsets(size, readers * reads)

    def read(number: int) -> None:
        buffers = [bytearray(BLOCK)]
        descriptor = os.open(path, os.O_RDONLY)
        for offset in offsets[number * reads : (number + 1) * reads]:
            if os.preadv(descriptor, buffers, offset) != BLOCK:
                raise ShortReadError(f"{path}: {offset}")
        os.close(descriptor)

    return {"seconds": [run_together(readers, read)], "reads": len(offsets)}


def scattered_ranges(
    store: dict[str, str], key: str, size: int, readers: int, reads: int
) -> Result:
    """Read as `scattered` does, with threads and obstore in place of a file system."""
    import obstore

    s3 = open_store(store)

    def get(offset: int) -> int:
        return len(obstore.get_range(s3, key, start=offset, length=BLOCK))

    offsets = _scattered_offsets(size, readers * reads)
    with ThreadPoolExecutor(readers) as pool:
        start = time.monotonic()
        if sum(pool.map(get, offsets)) != len(offsets) * BLOCK:
            raise ShortReadError(key)
        return {"seconds": [time.monotonic() - start], "reads": len(offsets)}


def _scattered_offsets(size: int, count: int) -> list[int]:
    return [block * BLOCK for block in random.Random(0).sample(range(size // BLOCK), count)]


def tensors(path: str, size: int, seed: int) -> Result:
    """Map a file and copy each of its tensors, in random order, as if a model was loaded."""
    order = random.Random(seed)
    places = []
    start = 0
    while start < size:
        span = math.log(LARGEST_TENSOR / SMALLEST_TENSOR)
        length = int(SMALLEST_TENSOR * math.exp(order.random() * span))
        places.append((start, min(start + length, size)))
        start += length
    order.shuffle(places)
    begun = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    with mapping, memoryview(mapping) as view:
        target = bytearray(LARGEST_TENSOR)
        for start, stop in places:
            target[: stop - start] = view[start:stop]
    return {"seconds": [time.monotonic() - begun], "bytes": size, "tensors": len(places)}


def burst(root: str, names_file: str, size: int, readers: int, each: int) -> Result:
    """Start processes together that each read `each` small files, one after the other."""
    names = json.loads(Path(names_file).read_text())
    random.Random(0).shuffle(names)

    def read(number: int) -> None:
        for name in names[number * each : (number + 1) * each]:
            if read_whole(f"{root}/{name}") != size:
                raise ShortReadError(name)

    return {"seconds": [run_together(readers, read)], "files": readers * each}


def beside(
    root: str,
    names_file: str,
    size: int,
    threads: int,
    first: int,
    large: str,
    large_size: int,
    readers: int,
) -> Result:
    """Read small files with threads while processes read a large file, until these have ended.

    Each of the `readers` has its share of the large file. Returns the times of the single small
    files in seconds. Without `readers`, only a quarter of the small files is read.
    """
    names = json.loads(Path(names_file).read_text())
    random.Random(0).shuffle(names)
    mine = names[first:] if readers else names[first : first + len(names) // 4]
    took: list[float] = []
    done = threading.Event()
    begun = time.monotonic()

    def read(paths: Sequence[str]) -> None:
        for path in paths:
            if done.is_set():
                return
            start = time.monotonic()
            if read_whole(path) != size:
                raise ShortReadError(path)
            took.append(time.monotonic() - start)

    children: list[int] = []
    large_s: list[float] = []

    def wait() -> None:
        if sum(os.waitpid(child, 0)[1] for child in children):
            took.clear()  # noticed below: nothing was read meanwhile
        large_s.append(time.monotonic() - begun)
        done.set()

    for number in range(readers):
        children.append(os.fork())
        if children[-1] == 0:
            share = large_size // readers
            _read_and_exit(large, number * share, (number + 1) * share)
    waiter = threading.Thread(target=wait)
    if readers:
        waiter.start()
    by_threads([f"{root}/{name}" for name in mine], threads, read)
    if readers:
        waiter.join()
    if not took:
        raise ShortReadError(large)
    return {"took_s": took, "large_s": large_s}


def _read_and_exit(path: str, start: int, stop: int) -> None:
    code = 1
    try:
        with open(path, "rb", buffering=0) as file:
            read_range(file, start, stop)
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(shards, shares, scattered, scattered_ranges, tensors, burst, beside)
