"""The attributes of very many files: chmod -R, chown -R."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from fusefs.posix.metadata import deferred_attributes
from fusefs.posix.metadata.attribute_log import AttributeLog
from fusefs.posix.metadata.deferred_attributes import AT_ONCE, DeferredAttributes
from fusefs.posix.metadata.object_metadata import Meta
from fusefs.posix.types import NewAttributes
from fusefs.store.errors import StoreError
from fusefs.store.fencing import ChangeToken
from fusefs.store.interface import ObjectInfo
from tests.support.memory_store import MemoryStore
from tests.support.survival.mortal_mount import MortalMount


class Bucket:
    """Takes attributes when it may, or refuses them."""

    def __init__(self) -> None:
        self.may_end = trio.Event()
        self.refuses = False

    async def copy(self, info: ObjectInfo, _meta: Meta, _token: ChangeToken) -> ObjectInfo:
        await self.may_end.wait()
        if self.refuses:
            raise StoreError("refused")
        return info


@asynccontextmanager
async def changed(bucket: Bucket, directory: Path, count: int) -> AsyncIterator[DeferredAttributes]:
    """With the attributes of so many files to be sent, and due."""

    async def landed(_old: ObjectInfo, _new: ObjectInfo) -> None:
        pass

    async def may_come_back(_info: ObjectInfo) -> bool:
        return False

    async with trio.open_nursery() as nursery:
        made = DeferredAttributes(
            nursery,
            AttributeLog(directory),
            MemoryStore(),
            bucket.copy,
            landed,
            lambda _info: None,
            may_come_back,
        )
        for number in range(count):
            made.put(ObjectInfo(f"file{number}", 7, '"1"', 0), Meta(0o600, 0, 0))
        await trio.sleep(2)
        yield made
        nursery.cancel_scope.cancel()


async def test_what_waits_to_be_sent_has_no_task_of_its_own(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    bucket = Bucket()
    before = trio.lowlevel.current_statistics().tasks_living
    async with changed(bucket, tmp_path, 10 * AT_ONCE) as attributes:
        assert trio.lowlevel.current_statistics().tasks_living <= before + AT_ONCE + 1
        bucket.may_end.set()
        await trio.sleep(1)
        assert not len(attributes)


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_change_waits_while_there_are_very_many_unless_the_bucket_takes_none(
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    refuses: bool,
) -> None:
    monkeypatch.setattr(deferred_attributes, "MOST", 20)
    bucket = Bucket()
    bucket.refuses = refuses
    async with changed(bucket, tmp_path, 20) as attributes:
        with trio.move_on_after(100) as scope:
            await attributes.wait_for_room()
        assert scope.cancelled_caught
        bucket.may_end.set()
        await attributes.wait_for_room()
        assert attributes.is_full == refuses
        await trio.sleep(1)
        with trio.fail_after(0.01):  # not until what was refused is tried again
            await attributes.wait_for_room()


async def test_a_file_that_is_removed_makes_room(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_attributes, "MOST", 20)
    async with changed(Bucket(), tmp_path, 20) as attributes, trio.open_nursery() as nursery:
        nursery.start_soon(attributes.wait_for_room)
        await trio.testing.wait_all_tasks_blocked()
        attributes.drop("file19")


async def test_a_chmod_waits_for_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_attributes, "MOST", 1)
    mount = MortalMount(tmp_path)
    for name in "ab":
        mount.store.put(name, b"x")
    async with mount.serving() as process:
        mutations = process.operations.mutations
        assert mutations is not None
        nodes = [(await process.node(name)).nodeid for name in "ab"]
        new = NewAttributes(mode=0o600)
        await mutations.setattr(nodes[0], new)
        assert mutations.setattr_now(nodes[1], new) is None
        mutations.writer.deferred.hurry("")
        await mutations.setattr(nodes[1], new)
        assert mount.store.objects["a"].info.metadata["mode"] == str(0o100600)
