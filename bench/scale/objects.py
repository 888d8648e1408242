"""One mount of a bucket of 50 million objects: walked, listed, and looked up at random.

The bucket is computed and not stored (bench/scale/simulated_bucket.py): 49,999 folders of 900
objects, and one of 5,000,900. The mount is measured: how many names a second it lists and looks up,
in windows, so that the effect of a growing table shows; and its daemon's memory, once a second. The
programs are this process and ls.

    python -m bench.scale.objects [--folders N] [--flat N] [--options "--metadata-ttl 1h"]

It needs root, for the kernel's own tables (/proc/slabinfo).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.processes import proportional_size, usage_of
from bench.scale.simulated_bucket import Shape, body_of, serving
from tests.support.machine.libc import DirectoryStream
from tests.support.mounting import Mount

MIB = 1 << 20
WINDOWS = 10
FOLDERS, PER_FOLDER, FLAT = 49_999, 900, 5_000_900
READ = 2000


@dataclass
class Memory:
    """The memory of the daemon, and its peak."""

    pid: int
    peak_pss: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Sample the memory once a second during the block."""
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            yield
        finally:
            self._stop.set()
            watcher.join()

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            with contextlib.suppress(OSError):
                self.peak_pss = max(self.peak_pss, proportional_size(self.pid))

    def show(self) -> dict[str, float]:
        now = proportional_size(self.pid)
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
        )
        return {
            "pss_mib": round(now / MIB, 1),
            "peak_pss_mib": round(max(now, self.peak_pss) / MIB, 1),
            "rss_mib": round(int(status["VmRSS"].split()[0]) / 1024, 1),
            "anonymous_mib": round(int(status["RssAnon"].split()[0]) / 1024, 1),
            "peak_rss_mib": round(int(status["VmHWM"].split()[0]) / 1024, 1),
            "kernel_mib": round(slab() / MIB, 1),
        }


def slab() -> int:
    """Return the bytes of the kernel's fusefs inodes and of all its cached names."""
    total = 0
    for line in Path("/proc/slabinfo").read_text().splitlines():
        fields = line.split()
        if fields[0] in ("fuse_inode", "dentry"):
            total += int(fields[1]) * int(fields[3])
    return total


def in_windows(pid: int, count: int, work: Callable[[int], int]) -> dict[str, object]:
    """Call `work` with each number below `count`; return the results for each window of numbers.

    The results are the rate, and the daemon's processor time for each, which other programs of the
    machine affect less.
    """
    rates, costs, done, total = [], [], 0, 0
    began_all = time.perf_counter()
    for window in range(WINDOWS):
        stop = count * (window + 1) // WINDOWS
        began, began_cpu = time.perf_counter(), usage_of(pid).cpu_s
        did = sum(work(number) for number in range(done, stop))
        rates.append(round(did / (time.perf_counter() - began)))
        costs.append(round((usage_of(pid).cpu_s - began_cpu) / did * 1e6, 1))
        done, total = stop, total + did
    seconds = time.perf_counter() - began_all
    return {"done": total, "seconds": round(seconds, 1), "rates": rates, "cpu_us": costs}


def walk(pid: int, root: Path, folders: int) -> dict[str, object]:
    """List folder after folder and stat each file, as os.walk does."""

    def one(number: int) -> int:
        with os.scandir(root / f"part-{number:05d}") as entries:
            return sum(entry.stat().st_size > 0 for entry in entries)

    return in_windows(pid, folders, one)


def stats(pid: int, root: Path, shape: Shape, count: int) -> dict[str, object]:
    """Stat a file in each of the folders, in random order."""
    chosen = random.Random(1)
    folders = list(range(shape.folders))
    chosen.shuffle(folders)

    def one(number: int) -> int:
        row = chosen.randrange(shape.per_folder)
        os.stat(root / f"part-{folders[number % len(folders)]:05d}" / f"sample-{row:03d}.bin")
        return 1

    return in_windows(pid, count, one)


def near_stats(pid: int, root: Path, folders: int) -> dict[str, object]:
    """Stat every file of a folder by name, in random order, folder after folder."""
    chosen = random.Random(2)

    def one(number: int) -> int:
        folder = root / f"part-{number:05d}"
        rows = chosen.sample(range(PER_FOLDER), PER_FOLDER)
        for row in rows:
            os.stat(folder / f"sample-{row:03d}.bin")
        return len(rows)

    return in_windows(pid, folders, one)


def reads(pid: int, root: Path, shape: Shape, count: int) -> dict[str, object]:
    chosen = random.Random(3)

    def one(_number: int) -> int:
        key = shape.key(chosen.randrange(len(shape)))
        if (root / key).read_bytes() != body_of(key):
            raise AssertionError(f"wrong bytes: {key}")
        return 1

    return in_windows(pid, count, one)


def listed(path: Path, expected: int) -> dict[str, object]:
    """Time `ls -f | wc -l`."""
    began = time.perf_counter()
    process = subprocess.run(
        f"ls -f {shlex.quote(str(path))} | wc -l", shell=True, capture_output=True, check=True
    )
    seconds, found = time.perf_counter() - began, int(process.stdout)
    if found != expected + 2:
        raise AssertionError(f"{found} names instead of {expected + 2}")
    return {"done": expected, "seconds": round(seconds, 1), "rate": round(expected / seconds)}


def scanned(path: Path, expected: int) -> dict[str, object]:
    began = time.perf_counter()
    with os.scandir(path) as entries:
        found = sum(1 for _ in entries)
    seconds = time.perf_counter() - began
    if found != expected:
        raise AssertionError(f"{found} names instead of {expected}")
    return {"done": expected, "seconds": round(seconds, 1), "rate": round(expected / seconds)}


def two_at_once(path: Path, expected: int) -> dict[str, object]:
    began = time.perf_counter()
    commands = [subprocess.Popen(["ls", "-f", path], stdout=subprocess.PIPE) for _ in range(2)]
    counts = [0, 0]

    def count(index: int) -> None:
        output = commands[index].stdout
        assert output is not None
        counts[index] = sum(1 for _ in output)
        commands[index].wait()

    threads = [threading.Thread(target=count, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if counts != [expected + 2] * 2:
        raise AssertionError(f"{counts} names instead of {expected + 2}")
    seconds = time.perf_counter() - began
    return {
        "done": 2 * expected,
        "seconds": round(seconds, 1),
        "rate": round(2 * expected / seconds),
    }


def interrupted(path: Path, shape: Shape) -> dict[str, object]:
    """Abandon a listing in the middle, and go back and forth in another."""
    began = time.perf_counter()
    with os.scandir(path) as entries:
        for _ in range(shape.flat // 10):
            next(entries)
    with DirectoryStream(path) as stream:
        places = []
        for number in range(shape.flat // 10):
            if number % (shape.flat // 100) == 0:
                places.append(stream.tell())
                places.append(stream.read())
            else:
                stream.read()
        random.Random(4).shuffle(pairs := list(zip(places[::2], places[1::2], strict=True)))
        for place, entry in pairs:
            stream.seek(place)
            if stream.read() != entry:
                raise AssertionError(f"seekdir({place}) does not lead to {entry}")
    return {"done": shape.flat // 5, "seconds": round(time.perf_counter() - began, 1)}


@contextlib.contextmanager
def mounted(url: str, directory: Path, options: list[str]) -> Iterator[Mount]:
    path = directory / "mnt"
    path.mkdir()
    mount = Mount(
        "s3://simulated",
        path,
        directory / "cache",
        url,
        {},
        directory / "log",
        ("--anonymous", "--log-level", "info", *options),
    )
    try:
        mount.start()
        yield mount
    finally:
        mount.clean_up()


class Run:
    """The phases of one mount, in their order."""

    def __init__(self, mount: Mount, shape: Shape, walked: int, looked_up: int, url: str) -> None:
        self.memory = Memory(mount.pid)
        self._mount, self._url = mount, url
        root, pid = mount.path, mount.pid
        flat = root / "flat"
        self.phases: dict[str, Callable[[], dict[str, object]]] = {
            "rest": dict,
            "walk": lambda: walk(pid, root, walked),
            "near": lambda: near_stats(pid, root, walked // 5),
            "stats": lambda: stats(pid, root, shape, looked_up),
            "reads": lambda: reads(pid, root, shape, READ),
            "list": lambda: listed(flat, shape.flat),
            "again": lambda: listed(flat, shape.flat),
            "scandir": lambda: scanned(flat, shape.flat),
            "places": lambda: interrupted(flat, shape),
            "two": lambda: two_at_once(flat, shape.flat),
        }

    def row(self, name: str) -> dict[str, object]:
        """Run a phase; return its results and the daemon's memory after it."""
        row = {"phase": name, **self.phases[name](), **self.memory.show()}
        row["nodes"] = self._mount.status()["metadata"]["nodes"]
        with urllib.request.urlopen(f"{self._url}/?stats") as answer:
            row["requests"] = json.load(answer)
        print(json.dumps(row), flush=True)
        return row


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--folders", type=int, default=FOLDERS)
    options.add_argument("--flat", type=int, default=FLAT)
    options.add_argument("--walk", type=int, default=5000, help="folders to walk through")
    options.add_argument("--stats", type=int, default=50_000, help="folders to stat a file in")
    options.add_argument("--options", default="", help="options of the mount")
    options.add_argument("--only", default="", help="phases, comma-separated")
    options.add_argument("--out", type=Path, help="where to write the rows, as JSON")
    chosen = options.parse_args()
    shape = Shape(chosen.folders, PER_FOLDER, chosen.flat)
    print(f"{len(shape):,} objects in {shape.folders + 1:,} folders", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="fusefs-scale-") as scratch,
        serving(shape) as url,
        mounted(url, Path(scratch), shlex.split(chosen.options)) as mount,
    ):
        run = Run(mount, shape, min(chosen.walk, shape.folders), chosen.stats, url)
        with run.memory.watched():
            only = chosen.only.split(",") if chosen.only else run.phases
            rows = [run.row(name) for name in run.phases if name in only]
    if chosen.out:
        chosen.out.write_text(json.dumps({"options": chosen.options, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
