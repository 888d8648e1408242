"""Reads through fsspec, and the same reads of files: `bench.fsspec` runs this in its own process.

Started anew for each measurement as `python -m bench.programs.urls SPEC`, with SPEC a JSON object:
`way` is `fusefs`, `s3fs` or `files`, `operation` names one of the operations of `_work`, and
`passes` is the number of timed passes. The process prints one JSON object: the seconds of each
pass, and a digest of the last result. Imports, and the making of the file system, are not timed.
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
# As many threads as fusefs's own `cat` has.
THREADS = 32
RANGE = 64 * KIB
ALONE = 200


class Files:
    """The mount's own files, read as programs with file names do."""

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
    """A file system of fsspec; `bucket` is the beginning of its paths."""

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
    """Read a file in pieces of 1 MiB, and return the last piece."""
    last = b""
    while piece := file.read(MIB):
        last = piece
    return last


def _work(way: Files | Urls, operation: str, names: list[str], large: str, size: int) -> Any:
    """Run one whole operation: the timed part."""
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
        found = None  # earlier results must not be freed within the next pass's time
        began = time.monotonic()
        found = _work(way, spec["operation"], names, spec["large"], spec["size"])
        seconds.append(time.monotonic() - began)
    digest = hashlib.sha256()
    for one in found or ():
        digest.update(one if isinstance(one, bytes) else repr(one).encode())
    print(json.dumps({"seconds": seconds, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main()
