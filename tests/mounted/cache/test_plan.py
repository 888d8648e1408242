"""`fusefs plan`: what is known to be read next is there before, and stays until then."""

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fusefs as fusefs_module
from bench.planned import farthest_misses
from tests.support.mounting import FUSEFS, Mount, Mounter, fetched, fusefs
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import read_all, stamped
from tests.support.survival.surviving import replace_daemon
from tests.support.waiting import until

MIB = 1 << 20
SIZE = MIB // 2
FILES = {f"train/c{number % 4}/f{number}": stamped(number, SIZE) for number in range(64)}
SHARDS = {f"shards/{number}": stamped(number, 7 * MIB + 5) for number in range(3)}


@pytest.fixture(scope="module")
def tree(shared: Bucket) -> Bucket:
    for key, content in (FILES | SHARDS).items():
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
    return dict(plan)


@states(
    "Files of a plan (`fusefs plan`) are fetched in its order, before anything opens them; "
    "what programs read goes first."
)
def test_planned_files_are_there_before_they_are_opened(
    here: Mount, faulty: FaultyS3, tmp_path: Path
) -> None:
    order = shuffled(1)
    result = give(here, tmp_path, [f"{here.path}/{order[0]}", *order[1:]])
    assert (result.returncode, result.stderr) == (0, "")
    until(lambda: plan_of(here)["ahead_files"] == len(FILES), "all of it is there")
    faulty.add("GET", code="AccessDenied")
    for key in order:
        assert read_all(here.path / key) == FILES[key]
    plan = plan_of(here)
    assert (plan["opens"], plan["in_time"], plan["state"]) == (64, 64, "read to its end")
    assert plan["fetched_bytes"] == sum(map(len, FILES.values()))


@states(
    "Of a file above 1 MiB with ranges in a plan, these are fetched, rounded to 256 KiB, and its "
    "first 256 KiB; also after the open, until the file is closed and a later one is opened."
)
def test_planned_ranges_are_fetched_and_nothing_else(
    behind: Mounter, tree: Bucket, faulty: FaultyS3, tmp_path: Path
) -> None:
    here = behind("--cache-size", "18MiB", bucket=tree)
    ranges = [(5 * MIB - 1, 7 * MIB), (2 * MIB, 2 * MIB + 9), (7 * MIB, 9 * MIB), (9**9, 9**10)]
    order = [*SHARDS, "shards/0"]
    lines = [f"{key}\t\t{start}-{stop}" for key in order for start, stop in ranges]
    assert give(here, tmp_path, lines).returncode == 0
    size = 3 * MIB - MIB // 4 + 5
    until(lambda: plan_of(here)["ahead_files"] == 1, "an eighth of the cache is used")
    plan = plan_of(here)
    assert (plan["entries"], plan["ahead_bytes"], plan["fetched_bytes"]) == (4, size, size)
    with (here.path / "shards/1").open("rb"):  # which reads the first MiB
        (here.path / "shards/0").open("rb").close()
        until(lambda: plan_of(here)["ahead_files"] == 1, "the last one is there as well")
        until(lambda: fetched(here) == 3 * size + 3 * MIB // 4, "the open one is")
    faulty.add("GET", code="AccessDenied")
    for key, content in SHARDS.items():
        for start, stop in ranges:
            with (here.path / key).open("rb", 0) as file:
                assert os.pread(file.fileno(), stop - start, start) == content[start:stop]
    plan = plan_of(here)
    assert (plan["opens"], plan["in_time"], plan["position"]) == (3, 2, 3)


@states("Of planned files the one goes first whose next use is farthest; pinned files stay.")
def test_what_is_used_last_goes_first(mounter: Mounter, tree: Bucket, tmp_path: Path) -> None:
    here = mounter("--cache-size", "18MiB", bucket=tree)
    pinned = shuffled(0)[:2]
    fusefs("pin", *(here.path / key for key in pinned))
    epochs = [shuffled(seed) for seed in range(4)]
    order = [key for epoch in epochs for key in epoch]
    assert give(here, tmp_path, order).returncode == 0
    for key in order:
        assert read_all(here.path / key) == FILES[key]
    plan = plan_of(here)
    best = sum(farthest_misses(epochs, 32)) * SIZE
    assert plan["position"] == len(order)
    assert (before := fetched(here)) <= 1.25 * best
    for key in pinned:
        assert read_all(here.path / key) == FILES[key]
    assert fetched(here) == before


@states(
    "A plan that is not followed is ignored after a while, and `fusefs status` says so; "
    "no read fails because of a plan."
)
def test_a_reader_that_leaves_its_plan_has_it_ignored(
    mounter: Mounter, tree: Bucket, tmp_path: Path
) -> None:
    here = mounter("--cache-size", "17MiB", bucket=tree)
    assert give(here, tmp_path, shuffled(1) * 3).returncode == 0
    for key in shuffled(2):
        assert read_all(here.path / key) == FILES[key]
    assert plan_of(here)["is_ignored"]
    assert "ignored: files are opened in another order" in fusefs("status", here.path).stdout


@states(
    "Nothing is evicted for a plan before about nine opens have followed it; until then an eighth "
    "of the cache is fetched ahead at most."
)
def test_a_plan_that_no_open_has_confirmed_evicts_nothing(
    mounter: Mounter, tree: Bucket, tmp_path: Path
) -> None:
    here = mounter("--cache-size", "18MiB", bucket=tree)
    read, planned = sorted(FILES)[:32], sorted(FILES)[32:]
    for _ in range(2):
        for key in read:
            assert read_all(here.path / key) == FILES[key]
    before = fetched(here)
    assert give(here, tmp_path, planned).returncode == 0
    until(lambda: plan_of(here)["fetched_bytes"] >= 2 * SIZE, "something is fetched")
    for key in read:
        assert read_all(here.path / key) == FILES[key]
    assert plan_of(here)["state"] == "not confirmed: few of its files were opened"
    assert fetched(here) - before <= 18 * MIB // 8 + SIZE


@states(
    "A plan outlives its daemon: the one that takes the mount over goes on with it. "
    "It ends with the mount."
)
def test_the_next_daemon_goes_on_with_a_plan(
    mounter: Mounter, tree: Bucket, tmp_path: Path
) -> None:
    here = mounter("--session", "kernel", bucket=tree)
    order = shuffled(1)
    assert give(here, tmp_path, order, "--reader", "rank 0").returncode == 0
    replace_daemon(here)
    until(lambda: here.status()["plans"], "it has the plan")
    until(lambda: plan_of(here)["entries"] == len(order), "it has all of it")
    for key in order[30:50]:
        assert read_all(here.path / key) == FILES[key]
    plan = plan_of(here)
    assert (plan["reader"], plan["position"]) == ("rank 0", 50)


def test_a_stall_begins_with_an_open_that_waits_for_s3(
    here: Mount, faulty: FaultyS3, tmp_path: Path
) -> None:
    order = shuffled(1)
    assert len([*here.path.rglob("f*")]) >= len(FILES)
    stalled = faulty.add("GET", stall=True)
    assert give(here, tmp_path, order).returncode == 0
    with subprocess.Popen(["cat", *order[:40]], cwd=here.path, stdout=subprocess.DEVNULL):
        until(lambda: plan_of(here)["late_since"], "a program waits")
        assert "ahead, no open in time for " in fusefs("status", here.path).stdout
        faulty.remove(stalled)
    assert plan_of(here)["late_since"] is None


def test_bad_plans_get_one_line_and_disturb_nothing(here: Mount, tmp_path: Path) -> None:
    packed = subprocess.check_output(["zstd", "-qc"], input="\n".join(FILES).encode())
    (tmp_path / "order.zst").write_bytes(packed)
    assert fusefs("plan", here.path, tmp_path / "order.zst").returncode == 0
    bad = {
        "binary": (os.urandom(3 * MIB), "is no list of paths"),
        "long": (b"a" * 3 * MIB, "an entry is too long"),
        "empty": (b"\n# a comment\n", "names no file of"),
        "elsewhere": (b"/etc/passwd\n", "names no file of"),
        "range": (b"train/c0/f0\t\t9-3\n", "line 1: '9-3' is no range of bytes, START-STOP"),
        "cut short": (packed[:-9], "can't be decompressed: "),
    }
    for name, (content, why) in bad.items():
        (tmp_path / name).write_bytes(content)
        result = fusefs("plan", here.path, tmp_path / name, check=False)
        assert (result.returncode, result.stderr.count("\n")) == (1, 1)
        assert why in result.stderr
        assert plan_of(here)["entries"] == len(FILES)
    result = give(here, tmp_path, ["/etc/passwd", sorted(FILES)[0]], "--reader", "b")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"{tmp_path}/plan.txt:1: /etc/passwd" in result.stderr
    result = give(here, tmp_path, ["no/such/file", "nor/this"], "--reader", "b")
    assert result.returncode == 1
    assert "2 of the first 2 paths are not in the bucket; the first of them is" in result.stderr
    assert fusefs("plan", here.path, "--end", "--reader", "b").returncode == 0
    assert fusefs("plan", here.path, "--end").returncode == 0
    assert here.status()["plans"] == []


class Shuffled:
    """A sampler as PyTorch's DistributedSampler is one: the epoch and the rank make its order."""

    epoch, rank = 0, 3

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(len(FILES)), len(FILES)))


class Batches:
    """A batch sampler as PyTorch's BatchSampler is one."""

    def __init__(self, sampler: Shuffled) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        return iter([order[at : at + 10] for at in range(0, len(order), 10)])


@states(
    "`fusefs.PlannedSampler` changes no order, and tells the mount each epoch as it begins, and "
    "the next one where the sampler has `set_epoch`."
)
@pytest.mark.parametrize("is_in_batches", [False, True])
def test_a_sampler_tells_the_mount_its_epochs(here: Mount, is_in_batches: bool) -> None:
    paths = [here.path / key for key in FILES]
    inner = Shuffled()
    sampler = Batches(inner) if is_in_batches else inner
    planned = fusefs_module.PlannedSampler(sampler, paths)
    for epoch in range(3):
        inner.set_epoch(epoch)
        iter(planned)  # one that is not used: DataLoader makes two an epoch
        order = list(planned)
        assert order == list(sampler)
        plan = plan_of(here)
        assert (plan["reader"], plan["entries"]) == ("3", (epoch + 2) * len(FILES))
        for each in order:
            for index in each if isinstance(each, list) else [each]:
                assert read_all(paths[index]) == FILES[str(paths[index].relative_to(here.path))]
    assert plan_of(here)["position"] == 3 * len(FILES)
    fusefs_module.plan(paths[:3], reader="3")
    assert plan_of(here)["entries"] == 3


@states(
    "`fusefs record` writes down the paths that programs open, in order, as they open them: "
    "it is the plan of a run that opens the same."
)
def test_a_recorded_run_of_a_killed_job_is_the_plan_of_the_next_one(
    here: Mount, tmp_path: Path
) -> None:
    order, record = shuffled(1), tmp_path / "order.txt"
    recording = subprocess.Popen([FUSEFS, "record", here.path, record])
    try:
        until(record.exists, "it records")
        until(lambda: read_all(here.path / order[0]) and record.read_text(), "opens are recorded")
        names = " ".join(str(here.path / key) for key in order[1:])
        job = subprocess.Popen(["sh", "-c", f"cat {names} > /dev/null; sleep 600"])
        until(lambda: record.read_text().split()[-1] == order[-1], "all are recorded")
        job.kill()
        job.wait()
    finally:
        recording.send_signal(signal.SIGINT)
        assert recording.wait() == 130
    paths = record.read_text().split()
    assert paths[paths.index(order[1]) :] == order[1:]
    fusefs("drop", here.path)
    assert fusefs("plan", here.path, record).returncode == 0
    until(lambda: plan_of(here)["ahead_files"] == len(paths), "it is there again")
