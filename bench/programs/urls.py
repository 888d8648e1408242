"""Reads through fsspec, and the same with files: what `bench.fsspec` runs in a process of its own.

Started afresh for each measurement as `python -m bench.programs.urls SPEC`, with SPEC a JSON
object: `way` is `fusefs`, `s3fs` or `files`, `operation` names one of the methods of `Ways`, and
`passes` is how often it is timed. The process prints one JSON object: the seconds of each pass,
and a digest of what the last has given. Imports, and the making of the file system, are not timed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

KIB, MIB = 1024, 1024 * 1024
# As many as fusefs's own `cat` has.
THREADS = 32
RANGE = 64 * KIB
ALONE = 200


class Files:
    """The mount's own files, read by programs that have paths."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def cat(self, names: list[str]) -> list[bytes]:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(self.read, names))

    def read(self, name: str) -> bytes:
        with open(self._root / name, "rb") as file:
            return file.read()

    def cat_ranges(self, name: str, starts: list[int]) -> list[bytes]:
        fd = os.open(self._root / name, os.O_RDONLY)
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                return list(pool.map(lambda start: os.pread(fd, RANGE, start), starts))
        finally:
            os.close(fd)

    def stream(self, name: str) -> bytes:
        with open(self._root / name, "rb") as file:
            return _sum(file)

    def ls(self, folder: str) -> list[tuple[str, int]]:
        with os.scandir(self._root / folder) as entries:
            return [(entry.name, entry.stat().st_size) for entry in entries]


class Urls:
    """A file system of fsspec's; `bucket` is the beginning of its paths."""

    def __init__(self, system: Any, bucket: str) -> None:
        self._system = system
        self._bucket = bucket

    def _path(self, name: str) -> str:
        return f"{self._bucket}/{name}"

    def cat(self, names: list[str]) -> list[bytes]:
        found = self._system.cat([self._path(name) for name in names])
        return [found[self._path(name)] for name in names]

    def read(self, name: str) -> bytes:
        with self._system.open(self._path(name), "rb") as file:
            return bytes(file.read())

    def cat_ranges(self, name: str, starts: list[int]) -> list[bytes]:
        ends = [start + RANGE for start in starts]
        found = self._system.cat_ranges([self._path(name)] * len(starts), starts, ends)
        return list(found)

    def stream(self, name: str) -> bytes:
        with self._system.open(self._path(name), "rb") as file:
            return _sum(file)

    def ls(self, folder: str) -> list[tuple[str, int]]:
        entries = self._system.ls(self._path(folder), detail=True)
        return [(one["name"].rpartition("/")[2], one["size"]) for one in entries]


def _sum(file: Any) -> bytes:
    """Read a file by 1 MiB, and give the last of it."""
    last = b""
    while piece := file.read(MIB):
        last = piece
    return last


def _work(way: Files | Urls, operation: str, names: list[str], large: str, size: int) -> Any:
    """The timed part: all of one operation."""
    if operation == "cat":
        return way.cat(names)
    if operation == "open":
        return [way.read(name) for name in names[:ALONE]]
    if operation == "cat_ranges":
        starts = random.Random(1).sample(
            range(0, size - RANGE, RANGE), min(1000, size // RANGE - 1)
        )
        return way.cat_ranges(large, starts)
    if operation == "stream":
        return [way.stream(large)]
    return sorted(way.ls("flat"))


def _way(name: str, root: str, options: dict[str, str]) -> Files | Urls:
    if name == "files":
        return Files(root)
    import fsspec

    if name == "fusefs":
        return Urls(fsspec.filesystem("fusefs"), options["bucket"])
    client = {"endpoint_url": options["endpoint"], "region_name": options["region"]}
    verify = {"verify": options["authority"]} if "authority" in options else {}
    return Urls(fsspec.filesystem("s3", client_kwargs={**client, **verify}), options["bucket"])


def main() -> None:
    spec = json.loads(sys.argv[1])
    way = _way(spec["way"], spec["root"], spec["options"])
    names = json.loads(Path(spec["names_file"]).read_text())
    seconds, found = [], None
    for _ in range(spec["passes"]):
        found = None  # what was read before is not to be freed within the next one's time
        began = time.monotonic()
        found = _work(way, spec["operation"], names, spec["large"], spec["size"])
        seconds.append(time.monotonic() - began)
    digest = hashlib.sha256()
    for one in found or ():
        digest.update(one if isinstance(one, bytes) else repr(one).encode())
    print(json.dumps({"seconds": seconds, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main()
