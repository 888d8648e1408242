"""A request that waits for what an earlier one has begun waits for what that is at."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
import trio.testing

from fusefs.posix.namespace.removals import MANY, Removals
from fusefs.store.interface import DeleteFailure, ObjectInfo
from fusefs.telemetry.stalls import CAUSES, STALLS, WaitCause, served, stage
from tests.support.memory_store import MemoryStore
from tests.support.survival.mortal_mount import MortalMount

# A cause that nothing else has in these tests.
AT = WaitCause.THROTTLED


class Held:
    """Something that takes until it may end, and is at AT meanwhile."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.may_end = trio.Event()

    async def pass_by(self) -> None:
        with stage(AT):
            self.begun.set()
            await self.may_end.wait()


class HeldStore(MemoryStore):
    """A bucket that answers changes when it may."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.held = held

    async def put_file(self, *arguments: Any, **more: Any) -> ObjectInfo:
        await self.held.pass_by()
        return await super().put_file(*arguments, **more)

    async def delete(self, *arguments: Any, **more: Any) -> None:
        await self.held.pass_by()
        await super().delete(*arguments, **more)

    async def delete_many(self, *arguments: Any, **more: Any) -> list[DeleteFailure]:
        await self.held.pass_by()
        return await super().delete_many(*arguments, **more)


def waited() -> dict[str, float]:
    return dict(zip(CAUSES, STALLS.totals().wait, strict=True))


async def assert_waits_for(held: Held, request: Callable[[], Awaitable[object]]) -> None:
    """The request waits for what is held, for nothing else, and from its own start on."""
    await held.begun.wait()
    before = waited()
    assert waited() == before  # nothing waits yet

    async def serve() -> None:
        with served():
            await request()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await trio.testing.wait_all_tasks_blocked()
        changed = {cause for cause, seconds in waited().items() if seconds > before[cause]}
        held.may_end.set()
    assert changed == {CAUSES[AT], "any"}
    before = waited()
    assert waited() == before  # the request has its answer


async def test_a_write_waits_for_the_upload_of_its_file(tmp_path: Path) -> None:
    held, mount = Held(), MortalMount(tmp_path)
    mount.store = HeldStore(held)
    async with mount.serving() as process:
        fh = await process.create("file", b"content")
        staged = (await process.node("file")).staged
        assert staged is not None
        process.writer.uploads.start(staged)
        await assert_waits_for(held, lambda: process.write(fh, 0, b"CON"))
        await process.close(fh)
    assert mount.store.contents() == {"file": b"CONtent"}


@asynccontextmanager
async def removals(store: MemoryStore, directory: Path) -> AsyncIterator[Removals]:
    """Of a program that removes many files of the directory `a/`."""
    async with trio.open_nursery() as nursery:
        made = Removals(store, directory, nursery)
        for number in range(MANY):
            assert not made.try_defer(f"a/{number}", None)
        made.note_allowed("a/0")
        yield made
        nursery.cancel_scope.cancel()


async def test_a_change_waits_for_the_removals_that_are_sent_together(tmp_path: Path) -> None:
    store = HeldStore(Held())
    store.put("a/file")
    async with removals(store, tmp_path) as sent:
        with served():  # as the request of the program that removes, which does not wait
            assert sent.try_defer("a/file", store.objects["a/file"].info.etag)
        await assert_waits_for(store.held, lambda: sent.flush("a/file"))
    assert store.contents() == {}
