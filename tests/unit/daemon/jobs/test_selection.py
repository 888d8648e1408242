"""Which objects paths, patterns and lists stand for."""

from __future__ import annotations

import pytest

from fusefs.daemon.jobs.selection import Selected, Selector, Shard
from fusefs.store.errors import NotFoundError, StoreError
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


@pytest.mark.parametrize(
    ("path", "why"), [("tra", "no such file"), ("x*/y", "nothing in the bucket matches")]
)
async def test_what_is_not_there_is_an_error(path: str, why: str) -> None:
    with pytest.raises(NotFoundError, match=why):
        await select(path)


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
    assert bucket.lists <= 10
    assert not bucket.heads


async def test_strangers_of_a_list_are_looked_up_one_by_one() -> None:
    bucket = Bucket(
        [f"p/d{number:03}/{other:02}" for number in range(100) for other in range(50)], page_size=50
    )
    keys, missed = await lines(bucket, *(f"d{number:03}/25" for number in range(100)))
    assert (len(keys), missed) == (100, [])
    assert bucket.lists <= 4


def test_shards_are_disjoint_complete_and_balanced() -> None:
    keys = [f"train/{number:06}.jpg" for number in range(8000)]
    counts = [sum(Shard(number, 8).has(key) for key in keys) for number in range(8)]
    assert sum(counts) == len(keys)
    assert min(counts) > 850
