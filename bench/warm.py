"""`python -m bench.warm`: the time to get a data set onto the local disk.

Three ways are measured in rounds whose order rotates, each from an empty cache: `fusefs warm
--wait`; `cat` of every file through the same kind of mount, as people do without it; and `rclone
copy` to a directory. The latter two read sixteen files at the same time, with the profile `cloud`
(a server far away, over TLS) 32. Times run from the start of the command until it has returned. The
server's files are in the page cache. After each way, the result has to have the data set's bytes:
in the mount without a request for them, or in the directory. It needs root and a real disk, as
`python -m bench` does.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import dataset, processes
from bench.bucket import Bucket
from bench.cloud.proxy import Distance, Proxy
from bench.contenders.contender import Place
from bench.contenders.fusefs import Fusefs
from bench.contenders.peers import find, rclone_environment
from bench.contenders.registry import CONTENDERS, KERNEL
from bench.processes import BenchError
from tests.support.servers.s3_server import S3Server

MIB = 1024 * 1024
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the data set: `count` files of `size` bytes below `folder`."""

    folder: str
    count: int
    size: int

    @property
    def bytes(self) -> int:
        return self.count * self.size

    def names(self) -> list[str]:
        return [f"{self.folder}/d{number // 100:03}/f{number:05}" for number in range(self.count)]

    def create(self, root: Path) -> None:
        for name in self.names():
            dataset.write_random(root / name, self.size)

    def upload(self, root: Path, store: Any) -> None:
        dataset.upload(store, root, self.names())

    def digest(self, root: Path) -> str:
        with ThreadPoolExecutor(8) as pool:
            return "".join(pool.map(lambda name: _digest(root / name), self.names()))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Profile:
    """The measurements against one server; sizes in bytes."""

    is_distant: bool
    small: int
    small_size: int
    large: int
    large_size: int
    at_once: int


PROFILES = {
    "local": Profile(False, 10_000, 64 * 1024, 2, 1024 * MIB, 16),
    "cloud": Profile(True, 2_000, 100 * 1024, 4, 256 * MIB, 32),
}


class Ways:
    """The ways to get a part of the data set onto the local disk; each returns its seconds."""

    def __init__(self, place: Place, at_once: int) -> None:
        self._place = place
        self._at_once = at_once
        mount = CONTENDERS[KERNEL]("fusefs", place)
        assert isinstance(mount, Fusefs)
        self._mount = mount

    def warm(self, part: Part, digest: str) -> float:
        fusefs = str(Path(sys.prefix) / "bin" / "fusefs")
        command = [fusefs, "warm", "--wait", str(self._mount.root / part.folder)]
        return self._mounted(part, digest, command)

    def cat(self, part: Part, digest: str) -> float:
        each = max(1, min(8, part.count // self._at_once))
        script = f"find . -type f -print0 | xargs -0 -P {self._at_once} -n {each} cat > /dev/null"
        return self._mounted(part, digest, ["sh", "-c", script])

    def rclone(self, part: Part, digest: str) -> float:
        target = self._place.scratch / "copied"
        shutil.rmtree(target, ignore_errors=True)
        bucket = self._place.bucket
        remote = f"bench:{bucket.name}/{part.folder}"
        command = [
            str(find("rclone")),
            "copy",
            remote,
            str(target / part.folder),
            "--transfers",
            str(self._at_once),
            "--checkers",
            str(self._at_once),
            "--ignore-checksum",
            "--multi-thread-streams",
            "8",
            "--use-server-modtime",
            "--fast-list",
        ]
        try:
            seconds = _timed(command, rclone_environment(bucket))
            _compare(part, target, digest)
            return seconds
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def _mounted(self, part: Part, digest: str, command: Sequence[str]) -> float:
        """Time a command in a folder of a new mount."""
        self._mount.start()
        try:
            seconds = _timed(command, dict(os.environ), self._mount.root / part.folder)
            before = self._mount.requests()["bytes_fetched"]
            _compare(part, self._mount.root, digest)
            if self._mount.requests()["bytes_fetched"] != before:
                raise BenchError(f"{command[0]}: not everything is in the cache")
            return seconds
        finally:
            self._mount.stop()


def _timed(
    command: Sequence[str], environment: dict[str, str], directory: Path | None = None
) -> float:
    begun = time.monotonic()
    done = subprocess.run(
        command, env=environment, cwd=directory, timeout=LIMIT_S, capture_output=True, text=True
    )
    seconds = time.monotonic() - begun
    if done.returncode:
        raise BenchError(f"{command[0]}: exit {done.returncode}: {done.stderr[-300:]}")
    return seconds


def _compare(part: Part, root: Path, digest: str) -> None:
    if part.digest(root) != digest:
        raise BenchError(f"{part.folder}: other bytes than in the bucket")


def run(
    place: Place, parts: Sequence[Part], rounds: int, at_once: int, ways_named: Sequence[str]
) -> None:
    """Measure the named ways with all parts, and print a table of medians."""
    ways = Ways(place, at_once)
    table: dict[str, Callable[[Part, str], float]] = {
        "fusefs warm": ways.warm,
        "cat": ways.cat,
        "rclone copy": ways.rclone,
    }
    table = {name: way for name, way in table.items() if name.split()[0] in ways_named}
    for part in parts:
        digest = part.digest(place.native_root)
        seconds: dict[str, list[float]] = {name: [] for name in table}
        for number in range(rounds):
            names = list(table)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                place.bucket.warm()
                took = table[name](part, digest)
                seconds[name].append(took)
                print(f"{part.folder:6} {name:12} {took:7.2f} s", file=sys.stderr, flush=True)
        print(f"{part.folder}: {part.count:,} files, {part.bytes // MIB:,} MiB")
        for name, taken in seconds.items():
            median = statistics.median(taken)
            pairs = zip(taken, seconds["fusefs warm"], strict=True)
            ratios = sorted(one / ours for one, ours in pairs)
            print(
                f"  {name:12} {median:7.2f} s  {part.bytes / MIB / median:6,.0f} MiB/s"
                f"  {part.count / median:7,.0f} files/s  {statistics.median(ratios):5.2f} times"
                f" warm's ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.warm", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", choices=list(PROFILES), default="local")
    parser.add_argument("--small", type=int, metavar="N", help="small files: 64 KiB, or 100 KiB")
    parser.add_argument("--large", type=int, metavar="N", help="large files: 1 GiB, or 256 MiB")
    parser.add_argument("--ways", default="fusefs,cat,rclone", help="comma-separated: %(default)s")
    parser.add_argument("--scratch", type=Path, default=Path(".bench-scratch"))
    arguments = parser.parse_args()
    profile = PROFILES[arguments.profile]
    small = profile.small if arguments.small is None else arguments.small
    large = profile.large if arguments.large is None else arguments.large
    parts = [
        Part("small", small, profile.small_size),
        Part("large", large, profile.large_size),
    ]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up, as for Ctrl-C
    base: Path = arguments.scratch.resolve()
    with ExitStack() as cleanup:
        scratch = cleanup.enter_context(processes.scratch_directory(base, "warm-"))
        server = cleanup.enter_context(S3Server(scratch / "server"))
        bucket = Bucket.create(server)
        native = scratch / "native"
        for part in parts:
            part.create(native)
            part.upload(native, bucket.store())
        bucket.age()
        if profile.is_distant:
            proxy = cleanup.enter_context(Proxy(server.endpoint_url, scratch, base / "build"))
            proxy.set(Distance())
            bucket = replace(bucket, proxy=proxy)
        run(
            Place(bucket, native, scratch),
            [part for part in parts if part.count],
            arguments.rounds,
            profile.at_once,
            arguments.ways.split(","),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
