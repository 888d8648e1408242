"""Random reads by fio, whose own cost per read is far below a Python loop's.

fio's options make it leave the page cache alone (it would drop the file from it) and give the
kernel no advice (unmodified programs give none either, and advice on a FUSE file does not reach a
file behind it). Every job has its own share of the file and reads each page of it once, so that
after the page cache was dropped no read finds a page that an earlier read fetched; with `repeat` it
begins again. A job ends with its share or at the time limit: slow contenders read less, but only
the rate counts.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.processes import BenchError, capture

PAGE = 4096


@dataclass(frozen=True, slots=True)
class RandomRead:
    """One random-read measurement: the jobs, the engine, and the reads of each page."""

    jobs: int
    engine: str = "psync"
    direct: bool = False
    repeat: int = 1


def is_installed() -> bool:
    return shutil.which("fio") is not None


def reads_per_second(
    path: Path, size: int, read: RandomRead, limit_s: float
) -> tuple[float, dict[str, Any]]:
    """Run fio; return the reads per second of all jobs together, and the details."""
    share = size // read.jobs // PAGE * PAGE
    argv = [
        "fio",
        "--name=read",
        f"--filename={path}",
        "--rw=randread",
        "--bs=4k",
        "--readonly",
        "--allow_file_create=0",
        "--invalidate=0",
        "--fadvise_hint=0",
        "--gtod_reduce=1",
        f"--ioengine={read.engine}",
        f"--direct={int(read.direct)}",
        f"--numjobs={read.jobs}",
        f"--size={share}",
        f"--offset_increment={share}",
        f"--loops={read.repeat}",
        f"--runtime={limit_s}",
        "--group_reporting",
        "--output-format=json",
    ]
    return _rate(capture(argv, 60 + 3 * limit_s))


def _rate(output: str) -> tuple[float, dict[str, Any]]:
    # Warnings may precede the JSON on the same stream.
    job = json.loads(output[output.index("{") :])["jobs"][0]
    if job["error"]:
        raise BenchError(f"fio: error {job['error']}")
    reads = job["read"]
    return float(reads["iops"]), {"reads": reads["total_ios"], "runtime_ms": reads["runtime"]}
