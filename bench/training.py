"""`python -m bench.training`: accelerator utilisation, DLIO-shaped.

DLIO-shaped, MLPerf record sizes, scaled: files and records have the sizes of MLPerf Storage's data
sets, but there are only as many as a laptop's disk has room for. It is not MLPerf Storage and its
figures are not comparable with MLPerf Storage results.

An accelerator is a sleep for each step. Its length is MLPerf's for an H100 and as many records, or
longer: long enough that the job on ext4 computes for 99 % of its time. The job has a fifth of the
data as memory, in its own control group, and the page cache is dropped before each epoch. The table
has the share of computing time from the second epoch on, and its ratio to ext4's share: with a
cache for all of the data, and with a cache for half of it.

It needs root and a real disk, as `python -m bench` does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import dataset, pagecache, processes
from bench.bucket import Bucket
from bench.cloud.profile import PROFILES, at_distance
from bench.contenders.contender import Contender, Native, Place
from bench.contenders.registry import CONTENDERS, KERNEL, PEERS
from bench.processes import BenchError
from bench.session import next_line
from tests.support.machine.cgroup import memory_group
from tests.support.servers.s3_server import S3Server, ServerError

MIB = 1024 * 1024
WORKERS = 4
EPOCHS = 4
MEMORY_SHARE = 5
# The utilisation that the job on ext4 has to reach, and the factor that lengthens its steps.
ENOUGH = 0.99
LENGTHENING = 1.25
TRIES = 16
# Least ratio to ext4's utilisation: if the cache has room for all data, or for half.
FLOORS = {"fits": 0.95, "half": 0.90}


@dataclass(frozen=True, slots=True)
class Model:
    """A data set: `files` of `per_file` records of `size` bytes, read `batch` at a time.

    `compute_s` is MLPerf Storage's time for a record on an H100; sizes and times are from its
    configurations, https://github.com/mlcommons/storage, configs/dlio/workload.
    """

    name: str
    kind: str
    size: int
    per_file: int
    files: int
    batch: int
    compute_s: float

    @property
    def bytes(self) -> int:
        return self.size * self.per_file * self.files

    def names(self) -> list[str]:
        return [f"{self.name}/{number:05}.{self.kind}" for number in range(self.files)]

    def create(self, root: Path) -> None:
        for name in self.names():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.kind == "npz":
                _write_npz(path, self.size)
            elif self.kind == "tfrecord":
                _write_tfrecord(path, self.size, self.per_file)
            else:
                dataset.write_random(path, self.size)
        os.sync()


MODELS = (
    Model("unet3d", "npz", 146_600_628, 1, 24, 1, 0.323 / 7),
    Model("resnet50", "tfrecord", 114_660, 1_251, 8, 40, 0.224 / 400),
    Model("cosmoflow", "tfrecord", 2_828_486, 1, 400, 1, 0.00350),
    Model("retinanet", "jpeg", 322_957, 1, 3_500, 16, 0.180 / 16),
)


def _write_npz(path: Path, size: int) -> None:
    """Write an archive like numpy.savez: one member, uncompressed."""
    with zipfile.ZipFile(path, "w") as archive, archive.open("x.npy", "w") as member:
        for start in range(0, size, MIB):
            member.write(os.urandom(min(MIB, size - start)))


def _write_tfrecord(path: Path, size: int, records: int) -> None:
    """Write frames of TFRecord; the checksum fields are empty, because the trainer skips them."""
    with path.open("wb") as file:
        for _ in range(records):
            file.write(size.to_bytes(8, "little") + bytes(4))
            for start in range(0, size, MIB):
                file.write(os.urandom(min(MIB, size - start)))
            file.write(bytes(4))


class Job:
    """A training job that reads a model's data below a directory."""

    def __init__(self, process: subprocess.Popen[str], place: Place) -> None:
        self._process = process
        self._place = place
        self._epochs = 0

    def epoch(self, compute_s: float) -> dict[str, float]:
        """Train an epoch, with none of the data in memory before; return its times and counts."""
        pagecache.drop()
        self._place.bucket.warm()
        assert self._process.stdin is not None
        order = {"compute_s": compute_s, "seed": self._epochs}
        self._epochs += 1
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return next_line(self._process)

    def utilisation(self, compute_s: float, epochs: int) -> float:
        """Train epochs; return the share of the time that was spent computing."""
        done = [self.epoch(compute_s) for _ in range(epochs)]
        return sum(one["computed_s"] for one in done) / sum(one["seconds"] for one in done)


@contextmanager
def running_job(model: Model, contender: Contender) -> Iterator[Job]:
    spec = {
        "root": str(contender.root),
        "names": model.names(),
        "kind": model.kind,
        "size": model.size,
        "per_file": model.per_file,
        "batch": model.batch,
        "workers": WORKERS,
    }
    command = [sys.executable, "-m", "bench.programs.trainer", json.dumps(spec)]
    with memory_group("fusefs-bench-training") as group:
        if group is None:
            raise BenchError("needs memory control groups")
        process = processes.open_reader(command, contender.place.bucket.environment())
        try:
            group.add(process.pid)
            group.limit(model.bytes // MEMORY_SHARE)
            yield Job(process, contender.place)
        finally:
            processes.kill_group(process)


def _compute_s(model: Model, native: Contender) -> tuple[float, float]:
    """Find a step's seconds with which ext4 is fast enough; also return its utilisation."""
    with running_job(model, native) as job:
        idle = job.epoch(0)
        compute_s = max(model.compute_s * model.batch, idle["seconds"] / idle["steps"])
        for _ in range(TRIES):
            if (found := job.utilisation(compute_s, 1)) >= ENOUGH:
                found = job.utilisation(compute_s, EPOCHS - 1)
            if found >= ENOUGH:
                return compute_s, found
            compute_s *= LENGTHENING
    raise BenchError(f"{model.name}: ext4 does not reach {ENOUGH:.0%}; the last was {found:.1%}")


def _measure(
    model: Model, contender: Contender, compute_s: float, limit: int | None
) -> list[float]:
    """Return the utilisation of each epoch, on a mount that begins with an empty cache."""
    contender.cache_limit = limit
    try:
        contender.start()
        with running_job(model, contender) as job:
            return [job.utilisation(compute_s, 1) for _ in range(EPOCHS)]
    finally:
        contender.stop()
        contender.cache_limit = None


def _run(model: Model, place: Place, names: list[str]) -> list[dict[str, Any]]:
    """Measure a model's data with all contenders."""
    compute_s, native = _compute_s(model, Native("native", place))
    _say(f"{model.name}: {1000 * compute_s:.1f} ms a step, ext4 {native:.1%}")
    rows = []
    for name in names:
        for cache, limit in (("fits", None), ("half", model.bytes // 2)):
            try:
                found = _measure(model, CONTENDERS[name](name, place), compute_s, limit)
            except (BenchError, OSError) as error:
                _say(f"{model.name} {name} {cache}: FAILED {error}")
                continue
            row = {
                "model": model.name,
                "contender": name,
                "cache": cache,
                "compute_ms": 1000 * compute_s,
                "native": native,
                "epochs": found,
                "later": statistics.mean(found[1:]),
            }
            _say(f"{model.name} {name} {cache}: " + ", ".join(f"{one:.1%}" for one in found))
            rows.append(row)
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| data | step, ms | ext4 | mount | cache | epoch 1 | later ones | of ext4 | at least |",
        "| --- | ---: | ---: | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        ratio, floor = row["later"] / row["native"], FLOORS[row["cache"]]
        met = "yes" if ratio >= floor else "NO"
        lines.append(
            f"| {row['model']} | {row['compute_ms']:.1f} | {row['native']:.1%}"
            f" | {row['contender']} | {row['cache']} | {row['epochs'][0]:.1%}"
            f" | {row['later']:.1%} | {ratio:.2f} | {floor:.2f} {met} |"
        )
    return "\n".join(lines)


def main() -> int:
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up, as for Ctrl-C
    base: Path = arguments.scratch.resolve()
    models = [model for model in MODELS if model.name in arguments.models.split(",")]
    try:
        for profile in arguments.profile.split(","):
            rows: list[dict[str, Any]] = []
            for model in models:
                scaled = replace(model, files=max(WORKERS, round(model.files * arguments.scale)))
                rows += _with_data(scaled, profile, base, arguments.contenders.split(","))
            print(f"## Profile {profile}\n\n{_table(rows)}\n", flush=True)
    except (BenchError, ServerError) as error:
        _say(f"bench.training: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted; all is cleaned up")
        return 1
    return 0


def _with_data(
    model: Model, profile: str, base: Path, contenders: list[str]
) -> list[dict[str, Any]]:
    """Run one model; only its data is on the disk meanwhile."""
    with place_of(model, profile, base) as place:
        return _run(model, place, contenders)


@contextmanager
def place_of(model: Model, profile: str, base: Path) -> Iterator[Place]:
    """Make a model's data, in a bucket at the profile's distance and as files."""
    with ExitStack() as cleanup:
        scratch = cleanup.enter_context(processes.scratch_directory(base, "training-"))
        server = cleanup.enter_context(S3Server(scratch / "server"))
        bucket = Bucket.create(server)
        native = scratch / "native"
        model.create(native)
        dataset.upload(bucket.store(), native, model.names())
        bucket.age()
        seen = cleanup.enter_context(at_distance(profile, bucket, scratch, base))
        yield Place(seen, native, scratch)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    parser.add_argument("--profile", default=",".join(PROFILES))
    parser.add_argument("--models", default=",".join(model.name for model in MODELS))
    parser.add_argument(
        "--contenders",
        default=KERNEL,
        help=f"comma-separated; {', '.join((KERNEL, *PEERS))}",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of files")
    parser.add_argument("--scratch", type=Path, default=Path(".bench-scratch"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
