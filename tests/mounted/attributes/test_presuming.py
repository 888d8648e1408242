"""Objects without a HEAD for modes, owners and times, because others have none."""

import itertools
import math
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trio

from fusefs.posix.directory.head_policy import (
    EXPERIENCE,
    MOST_CHANGED,
    READ_ONLY_SAMPLE,
    SAME_TIME_NS,
    SAMPLE,
    HeadPolicy,
)
from fusefs.posix.directory.listings import Directories
from fusefs.posix.directory.segment import Segment
from fusefs.posix.journal.journal import Journal
from fusefs.posix.metadata.head_cache import HeadCache
from fusefs.posix.nodes.inode_table import Inode, InodeTable, Ownership
from fusefs.posix.nodes.object_metadata import Meta
from fusefs.settings.patterns import PathRules
from fusefs.store.errors import NotFoundError
from tests.support.memory_store import SECOND_NS, MemoryStore, failing
from tests.support.mounting import WRITABLE, Mount, Mounter, cost, metadata
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, stored
from tests.support.servers.s3_server import S3Server

PLAIN = 6 * SAMPLE
ATTRIBUTES = {"mode": str(stat.S_IFREG | 0o751), "uid": "7"}


def heard_nothing(head_policy: HeadPolicy, prefix: str, count: int, modified_ns: int = 1) -> None:
    for _ in range(count):
        head_policy.observe(prefix, modified_ns, has_attributes=False)


def test_a_directory_is_presumed_silent_until_one_object_says_something() -> None:
    head_policy = HeadPolicy()
    heard_nothing(head_policy, "a/", SAMPLE - 1)
    assert not head_policy.has_no_attributes("a/", 1)
    heard_nothing(head_policy, "a/", 1)
    assert head_policy.has_no_attributes("a/", 1)
    assert not head_policy.has_no_attributes("b/", 1)
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


def test_directories_of_the_same_time_are_presumed_as_silent_as_those_beside_them() -> None:
    head_policy = HeadPolicy()
    since, until = 10 * SAME_TIME_NS, 12 * SAME_TIME_NS
    head_policy.sampled("p/a/", SAMPLE - 1, [since])
    assert not head_policy.is_like_others("p/b/", [since])
    head_policy.sampled("p/a/", 1, [until])
    for modified_ns in (since - SAME_TIME_NS - 1, until + SAME_TIME_NS + 1):
        assert not head_policy.is_like_others("p/b/", [since, modified_ns])
    assert not head_policy.is_like_others("q/b/", [since])
    assert head_policy.is_like_others("p/b/", [since - SAME_TIME_NS, until + SAME_TIME_NS])
    assert head_policy.has_no_attributes("p/b/", until)
    head_policy.observe("p/c/", since, has_attributes=True)
    assert not head_policy.is_like_others("p/d/", [since])


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


LINK = {"mode": str(stat.S_IFLNK | 0o777)}


@dataclass
class Walk:
    """A program that goes from folder to folder below `p/`; each is listed when it comes there."""

    store: MemoryStore
    directories: Directories
    head_cache: HeadCache
    inodes: InodeTable
    parent: Inode

    async def come_to(self, folder: str) -> tuple[Inode, Segment]:
        known = self.directories.get(f"p/{folder}/")
        segment = await self.directories.segment_behind(known, "", 0.0)
        return self.inodes.resolve(self.parent, folder, None), segment

    async def shown(self, folder: str) -> dict[str, Meta]:
        """The attributes of the files of a folder, as lstat of each shows them."""
        directory, segment = await self.come_to(folder)
        await self.head_cache.sample(directory, segment)
        found = {}
        for name, entry in segment.entries.items():
            inode = self.inodes.resolve(directory, name, entry)
            with suppress(NotFoundError):
                await self.head_cache.show(inode)
            found[name] = self.head_cache.meta(inode)
        return found


@asynccontextmanager
async def walking(store: MemoryStore, *, is_read_only: bool = False) -> AsyncIterator[Walk]:
    policy, inodes = HeadPolicy(is_read_only=is_read_only), InodeTable("", Journal(None))
    async with trio.open_nursery() as nursery:
        directories = Directories(store, inodes, PathRules(math.inf), nursery, policy)
        owner = Ownership(1, 2, 0o644, 0o755)
        head_cache = HeadCache(store, directories, inodes, owner, nursery)
        parent = inodes.resolve(inodes.root, "p", None)
        yield Walk(store, directories, head_cache, inodes, parent)


def put_folders(store: MemoryStore, folders: int) -> None:
    for folder in range(folders):
        for name in range(2 * SAMPLE):
            store.put(f"p/{folder}/{name:02}", b"x" * (name + 1))


@pytest.mark.parametrize(("is_read_only", "sample"), [(False, SAMPLE), (True, READ_ONLY_SAMPLE)])
async def test_a_walk_waits_for_the_heads_of_one_folder(is_read_only: bool, sample: int) -> None:
    store = MemoryStore()
    put_folders(store, 9)
    async with walking(store, is_read_only=is_read_only) as walk:
        await walk.shown("0")
        assert store.count("HEAD") == sample
        for folder in range(1, 9):
            directory, _ = await walk.come_to(str(folder))
            assert not walk.head_cache.wants_sample(directory)
            await walk.shown(str(folder))
    assert store.count("HEAD") == sample


@pytest.mark.parametrize(("is_read_only", "sample"), [(False, SAMPLE), (True, READ_ONLY_SAMPLE)])
async def test_of_folders_that_one_page_lists_one_has_heads(
    is_read_only: bool, sample: int
) -> None:
    store = MemoryStore()
    put_folders(store, 9)
    async with walking(store, is_read_only=is_read_only) as walk:
        for folder in range(9):
            segment = Segment("", None, {})
            for name in range(2 * SAMPLE):
                segment.entries[f"{name:02}"] = store.objects[f"p/{folder}/{name:02}"].info
            walk.head_cache.sample_ahead(f"p/{folder}/", segment)
        for folder in range(9):
            await walk.shown(str(folder))
    assert store.count("HEAD") == sample


@pytest.mark.parametrize("is_read_only", [False, True])
@pytest.mark.parametrize("changed", ["p/1/00", "p/1/07"])
async def test_links_and_modes_of_another_time_are_shown_at_once(
    is_read_only: bool, changed: str
) -> None:
    """The folder before has none; this one has a link, the smallest or the youngest file."""
    store = MemoryStore()
    put_folders(store, 1)
    late = next(store._clock) + 2 * SAME_TIME_NS // SECOND_NS
    store._clock = itertools.count(late)
    put_folders(store, 2)
    store.put(changed, b"x", **LINK)
    for name in list(store.objects):
        if name.startswith("p/0/"):
            stored = store.objects[name]
            stored.info = replace(stored.info, mtime_ns=SECOND_NS)
    async with walking(store, is_read_only=is_read_only) as walk:
        await walk.shown("0")
        found = await walk.shown("1")
        assert [name for name, meta in found.items() if meta.is_symlink] == [changed[-2:]]


@pytest.mark.parametrize("is_read_only", [False, True])
async def test_removed_files_tell_nothing_of_the_others(is_read_only: bool) -> None:
    store = MemoryStore()
    store.put("p/0/old", b"x" * 99, **LINK)
    put_folders(store, 1)
    removed = [("HEAD", key) for key in store.objects if key != "p/0/old"]
    store.before = failing(NotFoundError("removed"), *removed)
    async with walking(store, is_read_only=is_read_only) as walk:
        assert (await walk.shown("0"))["old"].is_symlink


async def test_a_program_that_opens_names_here_and_there_has_heads_of_few() -> None:
    store = MemoryStore()
    put_folders(store, 20)
    async with walking(store) as walk:
        for name in range(2 * SAMPLE):
            for folder in range(20):
                directory, segment = await walk.come_to(str(folder))
                entry = segment.entries[f"{name:02}"]
                await walk.head_cache.show(walk.inodes.resolve(directory, f"{name:02}", entry))
    # One of each folder, the first one's sample, and it decides for the others.
    assert store.count("HEAD") <= 20 + SAMPLE


@pytest.fixture
def plain(bucket: Bucket) -> Bucket:
    """Files 000 and so on that say nothing, and an older and larger one that does."""
    bucket.put("late", b"late", Metadata=ATTRIBUTES)
    for number in range(PLAIN):
        bucket.put(f"{number:03}", b"x")
    return bucket


@pytest.fixture
def mount(plain: Bucket, mounter: Mounter) -> Mount:
    return mounter(WRITABLE, bucket=plain)


def stat_all(mount: Mount) -> dict[str, os.stat_result]:
    names = sorted(os.listdir(mount.path))
    return {name: (mount.path / name).stat() for name in names}


@states(
    "Where 16 files of a directory, the smallest and the youngest among them, say nothing of the"
    " kind, the others, if not more than ten minutes younger, are taken to say nothing either until"
    " they are changed, and so are those of the directories beside it, if written within ten"
    " minutes of these; not in directories that were changed here."
)
def test_files_among_silent_ones_are_not_requested(mount: Mount, plain: Bucket) -> None:
    heads = cost(mount, lambda: stat_all(mount)).get("heads", 0)
    assert 0 < heads <= SAMPLE + 1
    late = (mount.path / "late").stat()
    assert (late.st_mode, late.st_uid) == (stat.S_IFREG | 0o644, os.geteuid())
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
