"""The files that a job is for, and its report."""

from typing import Any

import pytest

from fusefs.cli import status_report
from fusefs.cli.warm import together
from fusefs.daemon.jobs.cache_warmer import JobSpec, WarmJob
from fusefs.daemon.jobs.selection import Selected, Selector, Shard
from fusefs.store.errors import StoreError
from fusefs.store.interface import ObjectInfo
from tests.support.local_cache import Bucket
from tests.support.memory_store import MemoryStore

KEYS = [
    "p/a.tar",
    "p/b.tar",
    "p/b.txt",
    "p/.hidden/c.tar",
    "p/[odd]/d.tar",
    "p/train/a.tar",
    "p/train/deep/er/e.tar",
    "p/train/deep/f.txt",
    "p/train-2/g.tar",
    "p/val/h.tar",
    "outside/a.tar",
]


async def select(*paths: str, bucket: Bucket | None = None) -> tuple[list[str], list[str]]:
    """The keys and the roots of a path or pattern, without the mount's prefix."""
    selector = Selector(bucket or Bucket(KEYS, page_size=3), "p/")
    keys: list[str] = []
    roots: list[str] = []

    async def deliver(selected: Selected) -> None:
        keys.extend(info.key.removeprefix("p/") for info in selected.objects)
        roots.extend(root.removeprefix("p/") for root in selected.roots)

    for path in paths:
        await selector.select(path, deliver)
    return sorted(keys), sorted(roots)


@pytest.mark.parametrize(
    ("path", "keys", "roots"),
    [
        ("a.tar", ["a.tar"], ["a.tar"]),
        ("train/deep", ["train/deep/er/e.tar", "train/deep/f.txt"], ["train/deep"]),
        ("*.tar", ["a.tar", "b.tar"], ["a.tar", "b.tar"]),
        ("?.t*", ["a.tar", "b.tar", "b.txt"], ["a.tar", "b.tar", "b.txt"]),
        (
            "tr*",
            ["train-2/g.tar", "train/a.tar", "train/deep/er/e.tar", "train/deep/f.txt"],
            ["train", "train-2"],
        ),
        ("*/[ah].tar", ["train/a.tar", "val/h.tar"], ["train/a.tar", "val/h.tar"]),
        ("*/deep/*.txt", ["train/deep/f.txt"], ["train/deep/f.txt"]),
        (
            "train/**/*.tar",
            ["train/a.tar", "train/deep/er/e.tar"],
            ["train/a.tar", "train/deep/er/e.tar"],
        ),
        ("**/deep", ["train/deep/er/e.tar", "train/deep/f.txt"], ["train/deep"]),
        ("[odd]", ["[odd]/d.tar"], ["[odd]"]),  # what exists is no pattern
        (".h*/*", [".hidden/c.tar"], [".hidden/c.tar"]),
    ],
)
async def test_what_a_path_or_pattern_stands_for(
    path: str, keys: list[str], roots: list[str]
) -> None:
    assert await select(path) == (keys, roots)


async def test_a_pattern_finds_each_file_once_where_directories_end_a_page() -> None:
    store = MemoryStore()
    store.page_size = 1
    keys = [f"d/{number}/{name}" for number in range(3) for name in "fg"]
    for key in keys:
        store.put(key, b"x")
    found: list[str] = []

    async def deliver(selected: Selected) -> None:
        found.extend(info.key for info in selected.objects)

    await Selector(store, "").select("d/*", deliver)
    assert sorted(found) == keys


async def test_the_root_is_everything_of_the_mount() -> None:
    keys, roots = await select("")
    assert keys == sorted(key.removeprefix("p/") for key in KEYS[:-1])
    assert roots == ["p"]


async def lines(bucket: Bucket, *paths: str) -> tuple[list[str], list[tuple[int, str]]]:
    keys: list[str] = []
    missed: list[tuple[int, str]] = []

    async def deliver(selected: Selected) -> None:
        keys.extend(info.key for info in selected.objects)

    def miss(number: int, path: str, _error: StoreError) -> None:
        missed.append((number, path))

    await Selector(bucket, "p/").select_lines(list(enumerate(paths, 1)), deliver, miss)
    return sorted(keys), sorted(missed)


async def test_a_list_may_have_files_directories_and_patterns() -> None:
    bucket = Bucket(KEYS, page_size=2)
    keys, missed = await lines(
        bucket, "val/h.tar", "b.tar", "nothing", "train/deep", "b.*", "b.tar"
    )
    assert keys == ["p/b.tar", "p/b.tar", "p/b.txt", *KEYS[6:8], "p/val/h.tar"]
    assert missed == [(3, "nothing")]


async def test_neighbours_of_a_list_are_listed_together() -> None:
    bucket = Bucket(f"p/d/{number:05}" for number in range(5000))
    wanted = [f"d/{number:05}" for number in range(0, 5000, 2)]
    keys, missed = await lines(bucket, *wanted)
    assert (len(keys), missed) == (2500, [])
    assert (bucket.lists, bucket.heads) == (5, 0)


async def test_strangers_of_a_list_are_looked_up_one_by_one() -> None:
    dirs, files = range(100), range(50)
    bucket = Bucket([f"p/d{one:03}/{other:02}" for one in dirs for other in files], page_size=50)
    keys, missed = await lines(bucket, *(f"d{number:03}/25" for number in range(100)))
    assert (len(keys), missed, bucket.lists) == (100, [], 1)


def test_shards_are_disjoint_complete_and_balanced() -> None:
    keys = [f"train/{number:06}.jpg" for number in range(8000)]
    counts = [sum(Shard(number, 8).has(key) for key in keys) for number in range(8)]
    assert sum(counts) == len(keys)
    assert min(counts) > 850


GIB = 1 << 30
LIMIT = 100 * GIB


def job(**facts: Any) -> dict[str, Any]:
    plain = WarmJob(JobSpec("a"), 0.0).describe_within(LIMIT)
    return {**plain, "state": "under way", "is_listed": True, **facts}


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            {"bytes": 15 * GIB // 2, "done_bytes": 31 * GIB // 10, "eta_s": 125.0},
            "41%, 3.1 of 7.5 GiB, ETA 2 min",
        ),
        ({"bytes": GIB, "done_bytes": GIB // 2, "eta_s": 0.2}, "50%, 512 MiB of 1.0 GiB, ETA 1 s"),
        ({"bytes": GIB, "done_bytes": 0}, "0%, 0 B of 1.0 GiB"),
        ({"bytes": 2 * GIB, "done_bytes": GIB, "is_listed": False}, "1.0 of at least 2.0 GiB"),
        ({"bytes": 3 * GIB, "left_out_bytes": GIB, "done_bytes": GIB}, "50%, 1.0 of 2.0 GiB"),
        ({}, "100%, 0 of 0 B"),
    ],
)
def test_progress_is_a_share_sizes_and_the_time_left(facts: dict[str, Any], text: str) -> None:
    assert status_report.progress(job(**facts)) == text


def test_several_paths_are_shown_as_one() -> None:
    first = job(bytes=GIB, done_bytes=GIB, state="ended")
    second = job(bytes=3 * GIB, done_bytes=GIB, eta_s=60.0)
    assert status_report.progress(together([first, second])) == "50%, 2.0 of 4.0 GiB, ETA 1 min"
    listing = job(bytes=GIB, is_listed=False)
    assert status_report.progress(together([second, listing])) == "1.0 of at least 4.0 GiB"


def test_the_time_left_follows_from_the_speed_of_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    one = WarmJob(JobSpec("a"), 0.0)
    one.found([ObjectInfo(f"a/{number}", 100, "", 0) for number in range(10)], is_last=False)
    for _ in range(3):
        now += 1
        one.arrived(100, 100)
    assert one.describe_within(LIMIT)["eta_s"] is None  # there may be more
    one.found([], is_last=True)
    assert one.describe_within(LIMIT)["eta_s"] == pytest.approx(7)
