"""The readers: the functions that do the timed reading, in their own process.

Every contender is read by this code, started anew for each measurement as `python -m
bench.programs.readers SPEC`, with SPEC a JSON object: `op` names one of the functions, the other
keys are its keyword arguments. The process prints one JSON object as its last line and ends. It
imports only the standard library (and obstore when that is measured), so that the time is the file
system's.

Times are measured inside the process, from before the open to after the close; together.py says how
they are measured for simultaneous readers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, cast

from bench.programs.together import ShortReadError, by_tasks, by_threads, run_together

KIB = 1024
MIB = 1024 * KIB
PAGE = 4 * KIB

# A downloader's usual division of an object: parts that amortise a request, and enough parallel
# parts to use a link fully.
PART_SIZE = 8 * MIB
PARTS_AT_A_TIME = 8

Result = dict[str, Any]


def sequential(
    path: str, size: int, readers: int = 1, passes: int = 1, warm_up: bool = False
) -> Result:
    """Read the file in 1 MiB reads into one buffer; each reader takes its share of the file.

    With `warm_up` one pass goes before the timed passes.
    """
    share = size // readers

    def read_share(reader: int) -> None:
        stop = size if reader == readers - 1 else (reader + 1) * share
        with open(path, "rb", buffering=0) as file:
            read_range(file, reader * share, stop)

    if warm_up:
        run_together(readers, read_share)
    seconds = [run_together(readers, read_share) for _ in range(passes)]
    return {"seconds": seconds, "bytes": size}


def read_and_hold(path: str, size: int) -> Result:
    """Read the file once, print the time at once, and keep it open until stdin ends."""
    start = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        read_range(file, 0, size)
        result = {"seconds": [time.monotonic() - start], "bytes": size}
        print(json.dumps(result), flush=True)
        sys.stdin.read()
    return result


def read_range(file: FileIO, start: int, stop: int) -> None:
    buffer = bytearray(MIB)
    view = memoryview(buffer)
    file.seek(start)
    left = stop - start
    while left > 0:
        count = file.readinto(view if left >= MIB else view[:left])
        if not count:
            raise ShortReadError(f"{file.name}: {left} bytes are missing before {stop}")
        left -= count


def random_pages(
    path: str,
    size: int,
    readers: int,
    reads: int,
    limit_s: float,
    direct: bool = False,
    mapped: bool = False,
) -> Result:
    """Read 4 KiB at random page offsets: replaces fio if that is not installed.

    Each reader stays in its share of the file and stops after `reads` reads or `limit_s` seconds.
    """
    offsets = [_page_offsets(reader, size // readers, reads) for reader in range(readers)]
    done_reader, done_writer = os.pipe()

    def read_pages(reader: int) -> None:
        touch = _touch_mapped if mapped else _touch_read
        done = touch(path, size, offsets[reader], time.monotonic() + limit_s, direct)
        os.write(done_writer, done.to_bytes(8, "little"))

    seconds = run_together(readers, read_pages)
    total = sum(int.from_bytes(os.read(done_reader, 8), "little") for _ in range(readers))
    return {"seconds": [seconds], "reads": total}


def _page_offsets(reader: int, share: int, reads: int) -> list[int]:
    """Return `reads` offsets: all pages of the reader's share in random order, then again."""
    pages = list(range(reader * share // PAGE, (reader + 1) * share // PAGE))
    random.Random(reader).shuffle(pages)
    return [page * PAGE for page in itertools.islice(itertools.cycle(pages), reads)]


def _touch_read(path: str, size: int, offsets: list[int], deadline: float, direct: bool) -> int:
    # An anonymous mapping is page-aligned, as O_DIRECT demands of a buffer.
    buffers = [mmap.mmap(-1, PAGE)]
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        return _until(deadline, (os.preadv(descriptor, buffers, o) for o in offsets))
    finally:
        os.close(descriptor)


def _touch_mapped(path: str, size: int, offsets: list[int], deadline: float, direct: bool) -> int:
    with open(path, "rb", buffering=0) as file:
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    with mapping:
        return _until(deadline, (len(mapping[o : o + PAGE]) for o in offsets))


def _until(deadline: float, steps: Iterator[int]) -> int:
    done = 0
    for count in steps:
        if count != PAGE:
            raise ShortReadError(f"{count} bytes instead of a page")
        done += 1
        if done % 64 == 0 and time.monotonic() > deadline:
            break
    return done


def small_files(
    root: str,
    names_file: str,
    size: int,
    threads: int,
    passes: int = 1,
    warm_up: bool = False,
    seed: int = 0,
    bare: bool = False,
    is_shuffled: bool = True,
) -> Result:
    """Open, read and close every file, with threads, in an order that differs per pass.

    The ordinary way is Python's open().read(), one task per file, as loaders do it. `bare` makes
    three system calls per file instead, each thread with its share of the files and one buffer: the
    least that a reader can cost. The result has the times of the single files of the last pass,
    unless it is `bare`.
    """
    names = [f"{root}/{name}" for name in json.loads(Path(names_file).read_text())]
    shuffle = random.Random(seed).shuffle
    seconds = []
    took: list[float] = []
    for attempt in range(passes + warm_up):
        if is_shuffled:
            shuffle(names)
        if bare:
            elapsed = by_threads(names, threads, lambda mine: _read_barely(mine, size))
        else:
            took.clear()
            elapsed = by_tasks(names, threads, timed(read_whole, took), size)
        if attempt or not warm_up:
            seconds.append(elapsed)
    return {"seconds": seconds, "files": len(names), "took_s": took}


def timed(load: Callable[[str], int], took: list[float]) -> Callable[[str], int]:
    """Wrap a function so that the seconds of each call are added to `took`."""

    def run(name: str) -> int:
        start = time.monotonic()
        count = load(name)
        took.append(time.monotonic() - start)
        return count

    return run


def read_whole(path: str) -> int:
    with open(path, "rb") as file:
        return len(file.read())


def _read_barely(paths: Iterable[str], size: int) -> None:
    buffers = [bytearray(size)]
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            count = os.readv(descriptor, buffers)
        finally:
            os.close(descriptor)
        if count != size:
            raise ShortReadError(f"{path}: {count} of {size} bytes")


def walk(root: str, files: int, passes: int = 1) -> Result:
    """List every directory below `root` and lstat every file, as a loader does at its start."""
    seconds = []
    for _ in range(passes):
        start = time.monotonic()
        found = sum(1 for _ in _stats(root))
        seconds.append(time.monotonic() - start)
        if found != files:
            raise ShortReadError(f"{root}: {found} of {files} files are listed")
    return {"seconds": seconds, "files": files}


def _stats(root: str) -> Iterator[tuple[str, os.stat_result]]:
    for folder, _, names in os.walk(root, onerror=_raise):
        for name in names:
            path = f"{folder}/{name}"
            yield path, os.lstat(path)


def _raise(error: OSError) -> None:
    raise error


def kill_and_ask(pid: int, path: str, size: int) -> Result:
    """Kill a mount's daemon; return the seconds until a file's attributes and its bytes arrive."""
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    os.lstat(path)
    answer_s = time.monotonic() - start
    if read_whole(path) != size:
        raise ShortReadError(path)
    return {"answer_s": answer_s, "read_s": time.monotonic() - start}


def read_on_signal(path: str) -> Result:
    """Read a file's first byte after a line on stdin; return the read's end (monotonic time)."""
    print(json.dumps({}), flush=True)
    sys.stdin.readline()
    with open(path, "rb", buffering=0) as file:
        if not file.read(1):
            raise ShortReadError(path)
        return {"read_at": time.monotonic()}


def digest_file(path: str) -> Result:
    """Return the SHA-256 of one file, read in 1 MiB reads."""
    digest = hashlib.sha256()
    buffer = bytearray(MIB)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return {"digest": digest.hexdigest()}


def digest_files(root: str, names_file: str, threads: int) -> Result:
    """Return one SHA-256 over the names and contents of many files, read with threads."""
    return _digest_named(
        json.loads(Path(names_file).read_text()),
        lambda name: Path(root, name).read_bytes(),
        threads,
    )


def digest_listing(root: str) -> Result:
    """Return one SHA-256 over the relative names and sizes that a walk shows."""
    lines = sorted(f"{path[len(root) :]} {stat.st_size}" for path, stat in _stats(root))
    return {"digest": hashlib.sha256("\n".join(lines).encode()).hexdigest()}


def _digest_named(names: list[str], load: Callable[[str], Any], threads: int) -> Result:
    def line(name: str) -> str:
        return f"{name} {hashlib.sha256(load(name)).hexdigest()}"

    with ThreadPoolExecutor(threads) as pool:
        lines = sorted(pool.map(line, names))
    return {"digest": hashlib.sha256("\n".join(lines).encode()).hexdigest()}


def download_parts(
    store: dict[str, str], keys: list[str], target: str, width: int = PARTS_AT_A_TIME
) -> Result:
    """Download objects to files with obstore, in `width` parallel parts of 8 MiB in all.

    Parts of several objects take turns.
    """
    import obstore

    s3 = open_store(store)
    start = time.monotonic()
    sizes = [obstore.head(s3, key)["size"] for key in keys]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    descriptors = [os.open(f"{target}-{number}", flags, 0o600) for number in range(len(keys))]

    def part(place: tuple[int, int]) -> None:
        offset, number = place
        length = min(PART_SIZE, sizes[number] - offset)
        data = obstore.get_range(s3, keys[number], start=offset, length=length)
        if os.pwrite(descriptors[number], data, offset) != length:
            raise ShortReadError(f"{keys[number]}: a part at {offset} was not written whole")

    places = [
        (offset, number)
        for number, size in enumerate(sizes)
        for offset in range(0, size, PART_SIZE)
    ]
    with ThreadPoolExecutor(width) as pool:
        list(pool.map(part, sorted(places)))
    seconds = time.monotonic() - start
    for number, descriptor in enumerate(descriptors):
        os.close(descriptor)
        os.unlink(f"{target}-{number}")
    return {"seconds": [seconds], "bytes": sum(sizes)}


def download_stream(store: dict[str, str], key: str, target: str) -> Result:
    """Download an object to a file with obstore, as one stream."""
    import obstore

    s3 = open_store(store)
    start = time.monotonic()
    size = 0
    with open(target, "wb", buffering=0) as file:
        for data in obstore.get(s3, key).stream(min_chunk_size=MIB):
            size += file.write(data)
    seconds = time.monotonic() - start
    os.unlink(target)
    return {"seconds": [seconds], "bytes": size}


def get_objects(
    store: dict[str, str], prefix: str, names_file: str, size: int, threads: int, seed: int = 0
) -> Result:
    """Get many small objects with obstore, with threads, in shuffled order."""
    import obstore

    s3 = open_store(store)
    names = json.loads(Path(names_file).read_text())
    random.Random(seed).shuffle(names)

    def get(name: str) -> int:
        return len(obstore.get(s3, f"{prefix}/{name}").bytes())

    took: list[float] = []
    seconds = by_tasks(names, threads, timed(get, took), size)
    return {"seconds": [seconds], "files": len(names), "took_s": took}


def digest_object(store: dict[str, str], key: str) -> Result:
    """Return the same as `digest_file`, of an object read with obstore."""
    import obstore

    digest = hashlib.sha256()
    for data in obstore.get(open_store(store), key).stream(min_chunk_size=MIB):
        digest.update(data)
    return {"digest": digest.hexdigest()}


def digest_objects(store: dict[str, str], prefix: str, names_file: str, threads: int) -> Result:
    """Return the same as `digest_files`, of objects read with obstore."""
    import obstore

    s3 = open_store(store)
    return _digest_named(
        json.loads(Path(names_file).read_text()),
        lambda name: obstore.get(s3, f"{prefix}/{name}").bytes(),
        threads,
    )


def open_store(options: dict[str, str], keys: Mapping[str, str] = os.environ) -> Any:
    """Open a client for the bucket that `options` name."""
    from obstore.store import S3Store

    client: dict[str, Any] = {"allow_http": True}
    if "authority" in options:
        client["root_certificate"] = Path(options["authority"]).read_bytes()
    return S3Store(
        options["bucket"],
        endpoint=options["endpoint"],
        region=options["region"],
        access_key_id=keys["AWS_ACCESS_KEY_ID"],
        secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        client_options=cast(Any, client),
    )


def main(*operations: Callable[..., Result]) -> None:
    """Run the function that the command line names, and print the result."""
    spec = json.loads(sys.argv[1])
    by_name = {operation.__name__: operation for operation in operations}
    print(json.dumps(by_name[spec.pop("op")](**spec)))


if __name__ == "__main__":
    main(
        sequential,
        read_and_hold,
        random_pages,
        small_files,
        walk,
        kill_and_ask,
        read_on_signal,
        digest_file,
        digest_files,
        digest_listing,
        digest_object,
        digest_objects,
        download_parts,
        download_stream,
        get_objects,
    )
