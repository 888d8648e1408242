"""One started contender, and the functions that read through it.

Every read is done by `bench.programs.readers` in its own process, which ends with the read. One
exception: the reader that makes the first read of the large object keeps its handle open until
`release`, so that its cost for later opens can be measured.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import pagecache, processes
from bench.cloud.proxy import Proxy
from bench.contenders.contender import BareClient, Contender
from bench.dataset import LARGE, SMALL_SIZE, DataSet
from bench.processes import STOP_WAIT_S, BenchError

MB = 1_000_000
READER_WAIT_S = 240.0
THREADS = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured value with its details; `also` has values for further rows."""

    value: float
    detail: dict[str, Any]
    also: dict[str, float] = field(default_factory=dict)


class Session:
    """One started contender with the data set, and the functions that read through it.

    `has_written` is True if a large file has been written since the start. `limit_s` bounds each
    random-read measurement, `seed` orders the small files.
    """

    def __init__(self, contender: Contender, data: DataSet, limit_s: float, seed: int) -> None:
        self.contender = contender
        self.data = data
        self.limit_s = limit_s
        self.seed = seed
        self._has_large = False
        self._has_small = False
        self.has_written = False
        self._holder: subprocess.Popen[str] | None = None

    @property
    def large(self) -> Path:
        return self.contender.root / LARGE

    @property
    def small(self) -> Path:
        return self.contender.root / "small"

    def read(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run one operation of `bench.programs.readers` in its own process."""
        return self._run(_command(operation, arguments))

    def load(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run one operation of `bench.programs.loaders` in its own process."""
        return self._run(_command(operation, arguments, module="bench.programs.loaders"))

    def crowd(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run one operation of `bench.programs.crowds` in its own process."""
        return self._run(_command(operation, arguments, module="bench.programs.crowds"))

    def write(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run one operation of `bench.programs.writers` in its own process."""
        return self._run(_command(operation, arguments, module="bench.programs.writers"))

    def read_objects(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run an operation like `read`, to the bucket without a file system."""
        return self.read(operation, store=self._store, **arguments)

    def load_objects(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run an operation like `load`, to the bucket without a file system."""
        return self.load(operation, store=self._store, **arguments)

    def write_objects(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run an operation like `write`, to the bucket without a file system."""
        return self.write(operation, store=self._store, **arguments)

    def at_server(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run like `write_objects`, past the proxy: for preparations and comparisons, not timed."""
        near = self.contender.place.bucket.near().reader_options()
        return self.write(operation, store=near, **arguments)

    @property
    def proxy(self) -> Proxy | None:
        """The proxy before the server, if there is one."""
        return self.contender.place.bucket.proxy

    @property
    def _store(self) -> dict[str, str]:
        return self.contender.place.bucket.reader_options()

    def _run(self, command: list[str]) -> dict[str, Any]:
        return dict(json.loads(processes.capture(command, READER_WAIT_S, self._environment())))

    def read_large(self, **how: int) -> Sample:
        """Read the large object in 1 MiB reads."""
        size = self.data.sizes.large
        result = self.read("sequential", path=str(self.large), size=size, **how)
        return per_second(result, "bytes", MB)

    def read_small(self, passes: int = 1, warm_up: bool = False, bare: bool = False) -> Sample:
        """Read all small files, in the ordinary way or with `bare` system calls."""
        result = self.read(
            "small_files",
            root=str(self.small),
            names_file=str(self.data.names_file),
            size=SMALL_SIZE,
            threads=THREADS,
            passes=passes,
            warm_up=warm_up,
            seed=self.seed,
            bare=bare,
        )
        return per_second(result, "files")

    def get_small(self, threads: int) -> Sample:
        """Get the small objects with the bare client."""
        result = self.read_objects(
            "get_objects",
            prefix="small",
            names_file=str(self.data.names_file),
            size=SMALL_SIZE,
            threads=threads,
            seed=self.seed,
        )
        return per_second(result, "files")

    def fetch_large(self) -> Sample:
        """Read the large object first, with a reader that then keeps its handle open."""
        self._has_large = True
        arguments = {"path": str(self.large), "size": self.data.sizes.large}
        command = _command("read_and_hold", arguments)
        self._holder = processes.open_reader(command, self._environment())
        return per_second(next_line(self._holder), "bytes", MB)

    def fetch_small(self) -> Sample:
        """Make the first read of the small files."""
        self._has_small = True
        return self.read_small()

    def have_large(self) -> None:
        """Read the large object, unless the contender's cache has it."""
        if not self._has_large:
            self.fetch_large()

    def have_small(self) -> None:
        """Read the small files, unless the contender's cache has them."""
        if not self._has_small:
            self.fetch_small()

    def seconds_to_first_byte(self, path: Path, begin: Callable[[], None]) -> float:
        """Return the seconds from before `begin`, which makes the mount, to the first byte."""
        return self.seconds_to_first_bytes({path: begin})[0]

    def seconds_to_first_bytes(self, begins: Mapping[Path, Callable[[], None]]) -> list[float]:
        """Return seconds from before `begins`, which make the mounts at once, to each first byte.

        The times are in the order of `begins`.
        """
        with ExitStack() as cleanup:
            readers = [cleanup.enter_context(self._waiting_reader(path)) for path in begins]
            threads = cleanup.enter_context(ThreadPoolExecutor(len(readers)))
            begun = time.monotonic()
            moments = list(threads.map(_read_once_begun, readers, begins.values()))
        return [moment - begun for moment in moments]

    @contextmanager
    def _waiting_reader(self, path: Path) -> Iterator[subprocess.Popen[str]]:
        """Yield a process that opens and reads a file as soon as it gets a line."""
        reader = processes.open_reader(
            _command("read_on_signal", {"path": str(path)}), self._environment()
        )
        try:
            next_line(reader)
            yield reader
        finally:
            processes.kill_group(reader)

    def digest_object(self, name: str) -> str:
        """Return the SHA-256 of an object as the contender shows it."""
        if not isinstance(self.contender, BareClient):
            return str(self.read("digest_file", path=str(self.contender.root / name))["digest"])
        return str(self.read_objects("digest_object", key=name)["digest"])

    def digest_small(self) -> str:
        """Return the SHA-256 over the small files as the contender shows them."""
        arguments = {"names_file": str(self.data.names_file), "threads": THREADS}
        if isinstance(self.contender, BareClient):
            found = self.read_objects("digest_objects", prefix="small", **arguments)
        else:
            found = self.read("digest_files", root=str(self.small), **arguments)
        return str(found["digest"])

    def digest_listing(self, folder: str) -> str:
        """Return the SHA-256 over the names and sizes below a folder."""
        found = self.read("digest_listing", root=str(self.contender.root / folder))
        return str(found["digest"])

    def release(self) -> None:
        """End the reader that holds the large object, if there is one."""
        if self._holder is not None:
            holder, self._holder = self._holder, None
            try:
                holder.communicate(timeout=STOP_WAIT_S)  # it ends with its input
            finally:
                processes.kill_group(holder)

    def make_cold(self) -> None:
        """Empty the page cache, except for the server's data."""
        pagecache.drop()
        self.contender.place.bucket.warm()

    def _environment(self) -> dict[str, str]:
        return self.contender.place.bucket.environment()


def _command(
    operation: str, arguments: dict[str, Any], module: str = "bench.programs.readers"
) -> list[str]:
    return [sys.executable, "-m", module, json.dumps({"op": operation, **arguments})]


def _read_once_begun(reader: subprocess.Popen[str], begin: Callable[[], None]) -> float:
    """Return the monotonic time at which a waiting reader has a first byte."""
    begin()
    assert reader.stdin is not None
    reader.stdin.write("\n")
    reader.stdin.flush()
    return float(next_line(reader)["read_at"])


def next_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next line of a reader that keeps running."""
    assert process.stdout is not None
    assert process.stderr is not None
    readable, _, _ = select.select([process.stdout], [], [], READER_WAIT_S)
    line = process.stdout.readline() if readable else ""
    if not line:
        processes.kill_group(process)
        raise BenchError(f"the reader: {process.stderr.read().strip()[-300:] or 'timed out'}")
    return dict(json.loads(line))


def per_second(result: dict[str, Any], unit: str, scale: int = 1) -> Sample:
    """Return the rate of a reader's median pass, in `scale` units a second."""
    seconds = result["seconds"]
    detail = {"seconds": seconds}
    if took := sorted(result.get("took_s", [])):
        detail["p50_ms"] = 1000 * took[len(took) // 2]
        detail["p99_ms"] = 1000 * took[len(took) * 99 // 100]
    return Sample(result[unit] / statistics.median(seconds) / scale, detail)
