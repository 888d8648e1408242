"""The memory of a daemon whose cache holds very many small files.

The bucket is the computed one of bench.scale.objects. There are three measurements: at rest; after
N files have been read; and after a restart with many more files in the catalog (rows without files,
which nothing reads), when another N files have been read.

    python -m bench.scale.cached [--read N] [--rows N] [--options "--memory-limit 112MiB"]

Writing ten million rows takes minutes and 4 GiB.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from bench.processes import usage_of
from bench.scale.objects import PER_FOLDER, Memory, mounted
from bench.scale.simulated_bucket import SIZE, Shape, serving
from fusefs.cache import catalog
from fusefs.cache.ranges import RangeMap
from tests.support.mounting import Mount

ROWS = 10_000_000
AT_ONCE = 100_000


def read(mount: Mount, first: int, count: int) -> dict[str, object]:
    """Read `count` files, from folder `first` on; return the time and the daemon's cost."""
    began, began_cpu_s = time.perf_counter(), usage_of(mount.pid).cpu_s
    for number in range(first, first + count // PER_FOLDER):
        for path in (mount.path / f"part-{number:05d}").iterdir():
            path.read_bytes()
    cpu_us = (usage_of(mount.pid).cpu_s - began_cpu_s) / count * 1e6
    return {
        "read": count,
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_us": round(cpu_us),
    }


def add_rows(path: Path, count: int) -> None:
    """Write rows of files into a catalog that no mount uses."""
    with closing(sqlite3.connect(path)) as db:
        boot = db.execute("SELECT boot_id FROM files").fetchone()[0]
        for start in range(0, count, AT_ONCE):
            db.executemany(
                "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", _rows(start, boot)
            )
            db.commit()
        sums = db.execute("SELECT sum(bytes), count(*) FROM files").fetchone()
        db.execute(
            "UPDATE total SET bytes = ?, files = ?, crc = ?",
            (*sums, catalog._total_checksum(*sums)),
        )
        db.commit()


def _rows(start: int, boot: str) -> Iterator[tuple[object, ...]]:
    ranges = RangeMap(iter([(0, SIZE)])).pack()
    for number in range(start, start + AT_ONCE):
        # Spread like the hashes that name files.
        name, generation = f"{number * 0x9E3779B97F4A7C15 % (1 << 64):032x}", "00000000"
        crc = catalog._checksum(name, generation, number, SIZE, ranges, True, boot)
        yield name, generation, number, SIZE, ranges, SIZE, 1, boot, float(number), crc


def show(name: str, mount: Mount, memory: Memory, **what: object) -> None:
    files = mount.status()["cache"]["files"]
    print(json.dumps({"phase": name, **what, "files": files, **memory.show()}), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--read", type=int, default=81_000, help="files to read")
    options.add_argument("--rows", type=int, default=ROWS, help="files in the catalog")
    options.add_argument("--options", default="", help="options of the mount")
    chosen = options.parse_args()
    shape = Shape(49_999, PER_FOLDER, 1000)
    with (
        tempfile.TemporaryDirectory(prefix="fusefs-scale-") as scratch,
        serving(shape) as url,
        mounted(url, Path(scratch), shlex.split(chosen.options)) as mount,
    ):
        with (memory := Memory(mount.pid)).watched():
            show("rest", mount, memory)
            show("read", mount, memory, **read(mount, 0, chosen.read))
        if not chosen.rows:
            return
        mount.end()
        [path] = mount.cache.glob("*/catalog.sqlite3")
        add_rows(path, chosen.rows)
        began = time.perf_counter()
        mount.start()
        (mount.path / "flat" / "object-0000000.bin").read_bytes()
        first_byte_s = round(time.perf_counter() - began, 2)
        with (memory := Memory(mount.pid)).watched():
            show("rest", mount, memory, first_byte_s=first_byte_s)
            show("read", mount, memory, **read(mount, 1000, chosen.read))


if __name__ == "__main__":
    main()
