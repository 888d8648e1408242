"""Objects without a HEAD for modes, owners and times, because others have none."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from fusefs.cache.listing_cache import NoListingCache
from fusefs.posix.directory.listings import Directories
from fusefs.posix.directory.segment import Segment
from fusefs.posix.directory.walk import WALK_AFTER
from fusefs.posix.journal.journal import NoJournal
from fusefs.posix.metadata.head_cache import HeadCache
from fusefs.posix.metadata.head_policy import (
    EXPERIENCE,
    MOST_CHANGED,
    SAME_TIME_NS,
    SAMPLE,
    HeadPolicy,
)
from fusefs.posix.nodes.inode_table import Inode, InodeTable, Ownership
from tests.support.local_cache import Bucket as InMemory
from tests.support.mounting import Mount
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import mounted
from tests.support.writing import WRITABLE, cost, metadata

PLAIN = 3 * SAMPLE
ATTRIBUTES = {"mode": str(stat.S_IFREG | 0o751), "uid": "7"}


def heard_nothing(head_policy: HeadPolicy, prefix: str, count: int, modified_ns: int = 1) -> None:
    for _ in range(count):
        head_policy.observe(prefix, modified_ns, has_attributes=False)


def test_a_directory_is_presumed_silent_when_a_sample_of_it_was() -> None:
    head_policy = HeadPolicy()
    heard_nothing(head_policy, "a/", SAMPLE - 1)
    assert not head_policy.has_no_attributes("a/", 1)
    heard_nothing(head_policy, "a/", 1)
    assert head_policy.has_no_attributes("a/", 1)
    assert not head_policy.has_no_attributes("b/", 1)


def test_one_object_that_says_something_ends_the_presumption() -> None:
    head_policy = HeadPolicy()
    heard_nothing(head_policy, "a/", SAMPLE)
    head_policy.observe("a/", 1, has_attributes=True)
    heard_nothing(head_policy, "a/", SAMPLE)
    assert not head_policy.has_no_attributes("a/", 1)


def test_with_experience_one_silent_object_is_enough() -> None:
    head_policy = HeadPolicy()
    heard_nothing(head_policy, "a/", EXPERIENCE)
    heard_nothing(head_policy, "b/", 1)
    assert head_policy.has_no_attributes("b/", 1)
    head_policy.observe("c/", 1, has_attributes=True)
    assert not head_policy.has_no_attributes("b/", 1)


def test_what_came_later_than_the_silent_ones_is_requested() -> None:
    head_policy = HeadPolicy()
    heard_nothing(head_policy, "a/", SAMPLE, modified_ns=1000)
    assert head_policy.has_no_attributes("a/", 1000 + SAME_TIME_NS)
    assert not head_policy.has_no_attributes("a/", 1001 + SAME_TIME_NS)


def test_after_changes_in_many_directories_each_object_is_requested(tmp_path: Path) -> None:
    """Their names would take memory without end."""
    head_policy = HeadPolicy(record=tmp_path / "changed")
    heard_nothing(head_policy, "a/", SAMPLE)
    for number in range(MOST_CHANGED + 2):
        head_policy.changed(f"{number}/")
    assert not head_policy.has_no_attributes("a/", 1)
    assert not head_policy._changed
    later = HeadPolicy(record=tmp_path / "changed")
    heard_nothing(later, "a/", SAMPLE)
    assert not later.has_no_attributes("a/", 1)


def test_what_was_changed_here_is_requested_by_the_next_mount_too(tmp_path: Path) -> None:
    record = tmp_path / "changed"
    HeadPolicy(record=record).changed("a/\n\u20ac/")
    with record.open("a") as file:
        file.write('"cut o')
    head_policy = HeadPolicy(record=record)
    heard_nothing(head_policy, "a/\n\u20ac/", SAMPLE)
    assert not head_policy.has_no_attributes("a/\n\u20ac/", 1)


def test_a_renamed_directory_takes_along_what_is_known_of_it() -> None:
    head_policy = HeadPolicy()
    heard_nothing(head_policy, "new/", SAMPLE)
    head_policy.changed("old/deep/")
    head_policy.moved("old/", "new/")
    heard_nothing(head_policy, "new/deep/", SAMPLE)
    assert not head_policy.has_no_attributes("new/", 1)
    assert not head_policy.has_no_attributes("new/deep/", 1)


@asynccontextmanager
async def walk() -> AsyncIterator[tuple[InMemory, HeadCache, list[Inode], Segment]]:
    """A program has come to the third of nine silent folders, which is listed."""
    prefixes = [f"{folder}/" for folder in range(9)]
    store = InMemory(f"{prefix}{name}" for prefix in prefixes for name in range(5))
    head_policy = HeadPolicy()
    heard_nothing(head_policy, "elsewhere/", EXPERIENCE)
    inodes = InodeTable("", NoJournal())
    async with trio.open_nursery() as nursery:
        directories = Directories(store, math.inf, NoListingCache(), nursery, head_policy)
        head_cache = HeadCache(store, directories, inodes, Ownership(1, 2, 0o644, 0o755), nursery)
        for prefix in prefixes[:WALK_AFTER]:
            segment = await directories.segment_behind(directories.get(prefix), "", 0.0)
        nodes = [inodes.resolve(inodes.root, prefix[:-1], None) for prefix in prefixes]
        yield store, head_cache, nodes, segment


async def test_a_file_of_each_folder_that_a_walk_comes_to_is_looked_up_ahead() -> None:
    async with walk() as (store, head_cache, folders, _):
        pass
    # The first ones were listed by themselves.
    assert [head_cache.wants_sample(one) for one in folders] == 2 * [True] + 7 * [False]
    assert store.heads == 7


async def test_a_folder_of_which_a_file_is_just_looked_up_looks_up_no_other() -> None:
    async with walk() as (store, head_cache, folders, segment):
        files = [Inode(0, 0, folders[2], name, info) for name, info in segment.entries.items()]
        await head_cache.sample(folders[2], segment, files)
        assert not any(head_cache.needs_head(file) for file in files)
    assert store.heads == 7


@pytest.fixture
def plain(bucket: Bucket) -> Bucket:
    """Files 000 and so on that say nothing, and one behind them that does."""
    for number in range(PLAIN):
        bucket.put(f"{number:03}", b"x")
    bucket.put("late", b"late", Metadata=ATTRIBUTES)
    return bucket


@pytest.fixture
def mount(s3: S3Server, plain: Bucket, tmp_path: Path) -> Iterator[Mount]:
    with mounted(s3, f"s3://{plain.name}/", tmp_path / "first", WRITABLE) as mount:
        yield mount


def stat_all(mount: Mount) -> dict[str, os.stat_result]:
    names = sorted(os.listdir(mount.path))
    return {name: (mount.path / name).stat() for name in names}


@states(
    "Where the first 32 files of a directory say nothing of the kind, the others, if not more"
    " than ten minutes younger, are taken to say nothing either until they are changed;"
    " not in directories that were changed here."
)
def test_files_among_silent_ones_are_not_requested(mount: Mount) -> None:
    heads = cost(mount, lambda: stat_all(mount)).get("heads", 0)
    assert 0 < heads <= 2 * SAMPLE
    late = (mount.path / "late").stat()
    assert (late.st_mode, late.st_uid) == (stat.S_IFREG | 0o644, os.geteuid())


def test_what_is_changed_is_requested_before(mount: Mount, plain: Bucket) -> None:
    stat_all(mount)
    (mount.path / "late").chmod(0o600)
    assert metadata(plain, "late")["uid"] == "7"
    assert (mount.path / "late").stat().st_uid == 7


def test_what_is_written_to_keeps_what_it_says(mount: Mount, plain: Bucket) -> None:
    stat_all(mount)
    with (mount.path / "late").open("ab") as file:
        file.write(b"r")
    kept = metadata(plain, "late")
    assert (kept["mode"], kept["uid"]) == (ATTRIBUTES["mode"], ATTRIBUTES["uid"])
    assert stored(plain, "late") == b"later"


def test_what_was_changed_here_is_shown_by_later_mounts(
    mount: Mount, plain: Bucket, s3: S3Server
) -> None:
    (mount.path / "050").chmod(0o600)
    mount.end()
    mount.start()
    shown = stat_all(mount)
    assert stat.S_IMODE(shown["050"].st_mode) == 0o600
    assert stat.S_IMODE(shown["late"].st_mode) == 0o751
