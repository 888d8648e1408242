"""`fusefs plan`: what is known to be read next is there before, and stays until then."""

import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounting import FUSEFS, Mount, Mounter, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import read_all, stamped
from tests.support.survival.surviving import serving_pid
from tests.support.waiting import until

MIB = 1 << 20
SIZE = MIB // 2
FILES = {f"train/c{number % 4}/f{number}": stamped(number, SIZE) for number in range(64)}


@pytest.fixture(scope="module")
def data(shared: Bucket) -> Bucket:
    for key, content in FILES.items():
        shared.put(key, content)
    return shared


def shuffled(seed: int) -> list[str]:
    return random.Random(seed).sample(sorted(FILES), len(FILES))


def give(
    mount: Mount, tmp_path: Path, paths: list[str], *options: str
) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "plan.txt"
    file.write_text("".join(f"{path}\n" for path in paths))
    return fusefs("plan", mount.path, file, *options, check=False)


def plan_of(mount: Mount) -> dict[str, Any]:
    [plan] = mount.status()["plans"]
    found: dict[str, Any] = plan
    return found


def fetched(mount: Mount) -> int:
    count: int = mount.status()["s3"]["bytes_fetched"]
    return count


@states("Files of a plan are fetched in its order, before anything opens them.")
def test_planned_files_are_there_before_they_are_opened(
    mounter: Mounter, data: Bucket, faulty: FaultyS3, tmp_path: Path
) -> None:
    faulty.clear()
    here = mounter(bucket=data, endpoint_url=faulty.endpoint_url)
    order = shuffled(1)
    result = give(here, tmp_path, [f"{here.path}/{order[0]}", *order[1:]])
    assert (result.returncode, result.stderr) == (0, "")
    until(lambda: plan_of(here)["ahead_files"] == len(FILES), "all of it is there")
    faulty.add("GET", code="AccessDenied")
    for key in order:
        assert read_all(here.path / key) == FILES[key]
    faulty.clear()
    plan = plan_of(here)
    assert (plan["opens"], plan["in_time"], plan["state"]) == (64, 64, "read to its end")


def farthest_misses(order: list[str], room: int) -> int:
    """The misses of Belady's order, which evicts what is used last."""
    there: set[str] = set()
    misses = 0
    for at, key in enumerate(order):
        if key not in there:
            misses += 1
            if len(there) == room:
                uses = {one: number for number, one in reversed(list(enumerate(order[at:])))}
                there.remove(max(there, key=lambda one: uses.get(one, len(order))))  # noqa: B023
            there.add(key)
    return misses


@states("Of planned files the one goes first whose next use is farthest.")
def test_what_is_used_last_goes_first(mounter: Mounter, data: Bucket, tmp_path: Path) -> None:
    here = mounter("--cache-size", "17MiB", bucket=data)
    order = [key for epoch in range(4) for key in shuffled(epoch)]
    assert give(here, tmp_path, order).returncode == 0
    for key in order:
        assert read_all(here.path / key) == FILES[key]
    plan = plan_of(here)
    best = farthest_misses(order, 32) * SIZE
    assert plan["position"] == len(order)
    print(fetched(here) / best, plan)
    assert fetched(here) <= 1.25 * best


def test_a_reader_that_leaves_its_plan_has_it_ignored(
    mounter: Mounter, data: Bucket, tmp_path: Path
) -> None:
    here = mounter("--cache-size", "17MiB", bucket=data)
    assert give(here, tmp_path, shuffled(1) * 3).returncode == 0
    for key in shuffled(2):
        assert read_all(here.path / key) == FILES[key]
    until(lambda: plan_of(here)["is_ignored"], "the plan is ignored")
