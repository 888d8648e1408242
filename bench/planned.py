"""`python -m bench.planned`: a training job whose order the mount knows (`fusefs plan`).

The job is that of `python -m bench.training`, on a mount with a cache for half of the data and an
order that is shuffled anew each epoch. A step computes 1.3 times as long as its files' transfer
takes on an empty mount, so S3 is fast enough on average. The table has the accelerator's
utilisation in each epoch, compared with ext4's, and the bytes fetched from the second epoch on,
compared with Belady's order: without a plan, with a plan, and with the plan of another seed.

With `--small` it reads 2,000 cold files of 100 KiB instead, in a random order with eight threads:
without a plan, with a plan, and with the bare client at several widths, in files a second. For the
plan there is also a rate that includes the time of `fusefs plan` itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench import pagecache, processes
from bench.cloud.profile import CLOUD
from bench.contenders.contender import Native, Place
from bench.contenders.fusefs import Fusefs
from bench.training import EPOCHS, MODELS, Model, place_of, running_job

SLACK = 1.3
SMALL = Model("small", "jpeg", 102_400, 1, 2_000, 1, 0.0)
SMALL_ROUNDS = 3
THREADS = 8
WIDTHS = (32, 64, 128)
KINDS = {"no plan": None, "a plan": 0, "another order's plan": 1000}


def order(model: Model, seed: int) -> list[list[str]]:
    """Return each epoch's names in the order of bench/programs/trainer.py, whose seeds are 0, 1…"""
    names, epochs = model.names(), []
    for epoch in range(EPOCHS):
        random.Random(seed + epoch).shuffle(names)
        epochs.append(list(names))
    return epochs


def farthest_misses(epochs: list[list[str]], room: int) -> list[int]:
    """Return each epoch's misses if the file with the latest next use is evicted."""
    reads = [name for epoch in epochs for name in epoch]
    following: list[float] = [0.0] * len(reads)
    last: dict[str, int] = {}
    for at in range(len(reads) - 1, -1, -1):
        following[at] = last.get(reads[at], float("inf"))
        last[reads[at]] = at
    there: dict[str, float] = {}
    misses = [0] * len(epochs)
    for at, name in enumerate(reads):
        if name not in there:
            misses[at // len(epochs[0])] += 1
            if len(there) == room:
                del there[max(there, key=there.__getitem__)]
        there[name] = following[at]
    return misses


def _measure(model: Model, contender: Fusefs, compute_s: float, seed: int | None) -> str:
    """Train on a mount that begins empty; return the row of the table."""
    contender.cache_limit = model.bytes // 2
    try:
        contender.start()
        if seed is not None:
            plan = contender.place.scratch / "plan.txt"
            plan.write_text("".join(f"{one}\n" for epoch in order(model, seed) for one in epoch))
            contender.plan(plan)
        shares, fetched = [], [0]
        with running_job(model, contender) as job:
            for _ in range(EPOCHS):
                shares.append(job.utilisation(compute_s, 1))
                fetched.append(contender.requests()["bytes_fetched"])
    finally:
        contender.stop()
    room = contender.cache_limit // model.size
    best = sum(farthest_misses(order(model, 0), room)[1:]) * model.size * model.per_file
    ratio = (fetched[-1] - fetched[1]) / best
    cells = " | ".join(f"{share:.1%}" for share in shares)
    return f"| {cells} | {(fetched[-1] - fetched[1]) / 1e6:.0f} MB, {ratio:.2f} of the best |"


def run(model: Model, profile: str, base: Path) -> None:
    """Measure one model's data, and print its table."""
    with place_of(model, profile, base) as place:
        contender = Fusefs("fusefs", place, ["--min-free", "1%"])
        contender.start()
        try:
            with running_job(model, contender) as job:
                cold = job.epoch(0)
        finally:
            contender.stop()
        compute_s = SLACK * cold["seconds"] / cold["steps"]
        with running_job(model, Native("native", place)) as job:
            shares = [job.utilisation(compute_s, 1) for _ in range(EPOCHS)]
        print(f"{model.name}, {profile}: {model.files} files, {1000 * compute_s:.1f} ms a step\n")
        print(
            f"| | {' | '.join(f'epoch {n + 1}' for n in range(EPOCHS))} | fetched, 2 to {EPOCHS} |"
        )
        print(f"| --- |{' ---: |' * (EPOCHS + 1)}")
        print(f"| ext4 | {' | '.join(f'{share:.1%}' for share in shares)} | |", flush=True)
        for kind, seed in KINDS.items():
            print(f"| {kind} {_measure(model, contender, compute_s, seed)}", flush=True)


def run_small(profile: str, base: Path) -> None:
    """Read cold small files in every way, interleaved, and print the medians with their range."""
    rates: dict[str, list[float]] = {}
    with place_of(SMALL, profile, base) as place:
        names = [name.removeprefix(f"{SMALL.name}/") for name in SMALL.names()]
        listed = place.scratch / "names.json"
        listed.write_text(json.dumps(names))
        given = {"names_file": str(listed), "size": SMALL.size}
        for number in range(SMALL_ROUNDS):
            for width in WIDTHS:
                store = {"store": place.bucket.reader_options(), "prefix": SMALL.name}
                seconds = _read(place, "get_objects", **given, **store, threads=width, seed=number)
                rates.setdefault(f"bare client, {width} wide", []).append(SMALL.files / seconds)
            for is_planned in (False, True):
                contender = Fusefs("fusefs", place, ["--min-free", "1%"])
                contender.start()
                try:
                    began = time.monotonic()
                    if is_planned:
                        random.Random(number).shuffle(order := list(names))
                        plan = place.scratch / "plan.txt"
                        plan.write_text("".join(f"{SMALL.name}/{name}\n" for name in order))
                        contender.plan(plan)
                    planning_s = time.monotonic() - began
                    root = str(contender.root / SMALL.name)
                    seconds = _read(
                        place, "small_files", **given, root=root, threads=THREADS, seed=number
                    )
                finally:
                    contender.stop()
                kind = "a plan" if is_planned else "no plan"
                rates.setdefault(kind, []).append(SMALL.files / seconds)
                if is_planned:
                    whole = SMALL.files / (seconds + planning_s)
                    rates.setdefault("a plan, with its command", []).append(whole)
    print("| | files/s |\n| --- | ---: |")
    for kind, found in rates.items():
        middle = statistics.median(found)
        print(f"| {kind} | {middle:.0f} ({min(found):.0f} to {max(found):.0f}) |", flush=True)


def _read(place: Place, operation: str, **arguments: object) -> float:
    """Run an operation of bench/programs/readers.py, with cold pages; return its seconds."""
    pagecache.drop()
    place.bucket.warm()
    text = json.dumps({"op": operation, **arguments})
    command = [sys.executable, "-m", "bench.programs.readers", text]
    environment = place.bucket.environment()
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    return float(json.loads(done.stdout)["seconds"][0])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.planned", description=__doc__)
    parser.add_argument("--profile", default=CLOUD)
    parser.add_argument("--models", default="unet3d,retinanet")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of files")
    parser.add_argument("--scratch", type=Path, default=Path(".bench-scratch"))
    arguments = parser.parse_args()
    try:
        if arguments.small:
            run_small(arguments.profile, arguments.scratch.resolve())
            return 0
        for model in MODELS:
            if model.name in arguments.models.split(","):
                scaled = replace(model, files=max(8, round(model.files * arguments.scale)))
                run(scaled, arguments.profile, arguments.scratch.resolve())
    except processes.BenchError as error:
        print(f"bench.planned: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
