"""`python -m bench.fsspec`: reads through `fusefs://`, compared with files of the mount and s3fs.

Each operation is made in three ways, in its own process and in rounds whose order rotates: with the
mount's files (32 threads if fsspec's call has many files), through `fusefs://`, and through s3fs
(PyPI) straight to the server. The first two are measured twice: on a new mount with an empty cache,
and again when everything is cached and in the page cache. s3fs caches no contents, but its process
remembers listings, so its second pass is shown as well. The contents have to equal those of the
data set. It needs root and a real disk, as `python -m bench` does, and s3fs (`pip install -e
'.[bench]'`).
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench import dataset, pagecache, processes
from bench.bucket import Bucket
from bench.cloud.proxy import Distance, Proxy
from bench.contenders.contender import Place
from bench.contenders.fusefs import Fusefs
from bench.contenders.registry import CONTENDERS, KERNEL
from bench.dataset import LARGE, SMALL_SIZE, DataSet, Sizes
from bench.processes import BenchError
from bench.programs.urls import ALONE, RANGE
from tests.support.servers.s3_server import S3Server, ServerError

MIB = 1024 * 1024
LIMIT_S = 300.0
WAYS = ("files", "fusefs", "s3fs")


@dataclass(frozen=True, slots=True)
class Row:
    """An operation, its count of `unit`s, and the unit that is printed for a second of it."""

    operation: str
    unit: str
    count: float


@dataclass(frozen=True, slots=True)
class Reading:
    """The rates of the first pass and of later passes (median)."""

    first: float
    again: float


class Reads:
    """The operations on one data set, each way on a new mount."""

    def __init__(self, place: Place, data: DataSet) -> None:
        self._place = place
        self._data = data
        mount = CONTENDERS[KERNEL]("fusefs", place)
        assert isinstance(mount, Fusefs)
        self._mount = mount

    def rows(self, names: Sequence[str]) -> list[Row]:
        sizes = self._data.sizes
        ranges = min(1000, sizes.large // RANGE - 1)
        rows = [
            Row("cat", "files/s", sizes.small),
            Row("open", "files/s", min(ALONE, sizes.small)),
            Row("cat_ranges", "ranges/s", ranges),
            Row("stream", "MB/s", sizes.large / 1e6),
            Row("ls", "names/s", sizes.listed),
        ]
        return [row for row in rows if row.operation in names]

    def expected(self, row: Row) -> str:
        """Return the digest of an operation's result on the local copy."""
        _, digest = self._run("files", row, self._data.root, 1)
        return digest

    def read(self, way: str, row: Row, expected: str) -> Reading:
        """Measure both rates of one way, on a new mount unless the way is s3fs."""
        passes = 4
        if way == "s3fs":
            pagecache.drop()
            self._place.bucket.warm()
            seconds, digest = self._run(way, row, self._data.root, passes)
        else:
            self._mount.start()
            try:
                pagecache.drop()
                self._place.bucket.warm()
                seconds, digest = self._run(way, row, self._mount.root, passes)
            finally:
                self._mount.stop()
        if digest != expected:
            raise BenchError(f"{way}, {row.operation}: not what the bucket has")
        return Reading(row.count / seconds[0], row.count / statistics.median(seconds[1:]))

    def _run(self, way: str, row: Row, root: Path, passes: int) -> tuple[list[float], str]:
        bucket = self._place.bucket
        spec = {
            "way": way,
            "operation": row.operation,
            "root": str(root),
            "options": bucket.reader_options(),
            "names_file": str(self._data.names_file),
            "large": LARGE,
            "size": self._data.sizes.large,
            "passes": passes,
        }
        command = [sys.executable, "-m", "bench.programs.urls", json.dumps(spec)]
        result = json.loads(processes.capture(command, LIMIT_S, bucket.environment()))
        return list(result["seconds"]), str(result["digest"])


def measure(reads: Reads, rows: Sequence[Row], rounds: int) -> None:
    """Measure all rows in all ways, and print a table of medians."""
    print(f"{'':11}{'':9}" + "".join(f"{way:>18}" for way in WAYS))
    for row in rows:
        expected = reads.expected(row)
        readings: dict[str, list[Reading]] = {way: [] for way in WAYS}
        for number in range(rounds):
            turn = number % len(WAYS)
            for way in WAYS[turn:] + WAYS[:turn]:
                reading = reads.read(way, row, expected)
                readings[way].append(reading)
                print(f"{row.operation} {way} {reading}", file=sys.stderr, flush=True)
        for name in ("first", "again"):
            rates = {way: [getattr(one, name) for one in found] for way, found in readings.items()}
            middle = "".join(f"{statistics.median(found):18,.0f}" for found in rates.values())
            print(
                f"{row.operation:11}{name:9}{middle} {row.unit}; {_ratio(rates, 'files')};"
                f" {_ratio(rates, 's3fs')}",
                flush=True,
            )


def _ratio(rates: dict[str, list[float]], other: str) -> str:
    found = [one / two for one, two in zip(rates["fusefs"], rates[other], strict=True)]
    return f"{statistics.median(found):.2f} of {other} ({min(found):.2f} to {max(found):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fsspec", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", choices=("local", "cloud"), default="local")
    parser.add_argument("--large", type=int, default=256, metavar="MIB", help="default 256")
    parser.add_argument("--small", type=int, default=1000, metavar="N", help="default 1000")
    parser.add_argument("--listed", type=int, default=10_000, metavar="N", help="default 10000")
    parser.add_argument("--rows", default="cat,open,cat_ranges,stream,ls")
    parser.add_argument("--scratch", type=Path, default=Path(".bench-scratch"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up, as for Ctrl-C
    try:
        _run(arguments)
    except (BenchError, ServerError) as error:
        print(f"bench.fsspec: {error}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> None:
    base: Path = arguments.scratch.resolve()
    sizes = Sizes(large=arguments.large * MIB, small=arguments.small, listed=arguments.listed)
    with ExitStack() as cleanup:
        scratch = cleanup.enter_context(processes.scratch_directory(base, "fsspec-"))
        server = cleanup.enter_context(S3Server(scratch / "server"))
        bucket = Bucket.create(server)
        data = DataSet(scratch / "native", scratch / "names.json", sizes)
        _create(data, bucket)
        if arguments.profile == "cloud":
            proxy = cleanup.enter_context(Proxy(server.endpoint_url, scratch, base / "build"))
            proxy.set(Distance())
            bucket = replace(bucket, proxy=proxy)
        reads = Reads(Place(bucket, data.root, scratch), data)
        measure(reads, reads.rows(arguments.rows.split(",")), arguments.rounds)


def _create(data: DataSet, bucket: Bucket) -> None:
    """Make the files of the rows, and upload them to the bucket."""
    small = [f"small/{name}" for name in data.small_names()]
    listed = [f"flat/f{number:05}.txt" for number in range(data.sizes.listed)]
    dataset.write_random(data.root / LARGE, data.sizes.large)
    for name in small:
        dataset.write_random(data.root / name, SMALL_SIZE)
    for number, name in enumerate(listed):
        dataset.write_random(data.root / name, 16 + number % 64)
    data.names_file.write_text(json.dumps(small))
    dataset.upload(bucket.store(), data.root, [LARGE, *small, *listed])
    bucket.age()


if __name__ == "__main__":
    sys.exit(main())
