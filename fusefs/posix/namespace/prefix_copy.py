"""Everything below a prefix, copied to another one by the server, many objects at a time.

What is there already counts as copied, so that an interrupted run can be gone
on with. An object is a copy of another if it has its size and is not older,
by the bucket's own clock; within the same second, if it has its ETag as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import groupby
from typing import TypeVar

import trio

from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError
from fusefs.store.interface import Condition, Expect, ObjectInfo, ObjectVersion, Store

logger = logging.getLogger("fusefs.renaming")

Item = TypeVar("Item")
IsDated = Callable[[ObjectInfo], bool]

SECOND_NS = 1_000_000_000

# The store has fewer connections, or as many; each copy is a request or two.
AT_ONCE = 64
# S3 takes a thousand with a request; several smaller ones are done at the same time.
DELETES_AT_ONCE = 250
# Somebody who replaces an object faster than this often has it copied once more next time.
TRIES = 3


class Copies:
    """What is copied from below `old` to below `new`; `empty` is a descriptor of an empty file.

    `is_dated` tells of objects whose metadata is known to say when they were modified.

    `sources` are the objects that were copied and `made` the copies, both by
    the old key. `total` is how many there are to be; they were listed after
    `listed_at`, in monotonic seconds.
    """

    def __init__(self, store: Store, old: str, new: str, empty: int, is_dated: IsDated) -> None:
        self._store = store
        self.old = old
        self.new = new
        self._empty = empty
        self._is_dated = is_dated
        self.sources: dict[str, ObjectInfo] = {}
        self.made: dict[str, ObjectInfo] = {}
        self.total = 0
        self.listed_at = 0.0

    def target(self, key: str) -> str:
        """The key of the copy of an object."""
        return self.new + key[len(self.old) :]

    def by_version(self) -> dict[ObjectVersion, ObjectInfo]:
        """The copies by the versions that they are of."""
        return {source.version: self.made[key] for key, source in self.sources.items()}

    def folders(self) -> set[str]:
        """The old prefixes that have no marker: some servers show them until they are deleted."""
        folders = {self.old}
        for key in self.sources:
            at = key.rfind("/")
            while at >= len(self.old) and key[: at + 1] not in folders:
                folders.add(key[: at + 1])
                at = key.rfind("/", 0, at)
        return folders - self.sources.keys()

    async def recall(self) -> list[ObjectInfo]:
        """Know what an earlier run has copied; return what is below the old prefix.

        Raises:
            StoreError: the bucket could not tell.
        """
        self.listed_at = time.monotonic()
        listed = await list_all(self._store, self.old)
        there = {info.key: info for info in await list_all(self._store, self.new)}
        for source in listed:
            copy = there.get(self.target(source.key))
            if copy is not None and is_copy(copy, source):
                self.sources[source.key], self.made[source.key] = source, copy
        return listed

    async def bring(self, listed: Iterable[ObjectInfo] | None = None) -> None:
        """Have everything that is below the old prefix below the new one, and no more.

        May be called again when something has changed. `listed` is what is
        below the old prefix, if that is known.

        Raises:
            StoreError: something could not be copied; the rest may be.
        """
        if listed is None:
            self.listed_at = time.monotonic()
            listed = await list_all(self._store, self.old)
        found = {info.key: info for info in listed}
        self.total = len(found)
        gone = [key for key in self.made if key not in found]
        await self._take_back(gone)
        todo = [info for info in found.values() if not self._is_copied(info)]
        # The markers of directories from the top down, and before what is in them: a server
        # that makes directories for keys would race with them, and both lose by that.
        markers = [info for info in todo if _is_marker(info)]
        for _, level in groupby(sorted(markers, key=_depth), key=_depth):
            await _each(self._copy, list(level))
        await _each(self._copy, [info for info in todo if not _is_marker(info)])

    def _is_copied(self, info: ObjectInfo) -> bool:
        source = self.sources.get(info.key)
        if source is None or source.version != info.version:
            return False
        return source.mtime_ns // SECOND_NS == info.mtime_ns // SECOND_NS

    async def _copy(self, source: ObjectInfo) -> None:
        key = self.target(source.key)
        earlier = self.made.get(source.key)
        condition = Expect(earlier.etag if earlier is not None else None)
        try:
            if _is_marker(source):
                made = await self._make_marker(source.key, key, condition)
            else:
                source, made = await copy_current(
                    self._store, source, key, self._is_dated, condition
                )
        except NotFoundError:
            self.total -= 1
            return  # removed by somebody else meanwhile
        self.sources[source.key], self.made[source.key] = source, made

    async def _make_marker(self, source: str, key: str, condition: Condition) -> ObjectInfo:
        """Not every server copies a directory's marker."""
        marker = await self._store.head(source)
        return await self._store.put_file(
            key,
            self._empty,
            0,
            metadata=marker.metadata or {},
            content_type=marker.content_type,
            condition=condition,
        )

    async def undo(self, *, keep: str = "") -> None:
        """Remove the copies, except the one of the key `keep`.

        Raises:
            StoreError: some are still there.
        """
        await self._take_back([key for key in self.made if self.made[key].key != keep])

    async def _take_back(self, keys: list[str]) -> None:
        if keys:
            await delete_all(self._store, {self.made[key].key: self.made[key].etag for key in keys})
        for key in keys:
            del self.sources[key], self.made[key]


def _is_marker(info: ObjectInfo) -> bool:
    return info.key.endswith("/") and not info.size


def _depth(info: ObjectInfo) -> int:
    return info.key.count("/")


async def copy_current(
    store: Store, source: ObjectInfo, key: str, is_dated: IsDated, condition: Condition = None
) -> tuple[ObjectInfo, ObjectInfo]:
    """Copy an object as it is now, which need not be as it was listed; return both.

    A copy is as young as it is, so its metadata is to say how old the content is.

    Raises:
        ExistsError: there is an object under `key`, against `condition`.
        NotFoundError: it is not there any more.
    """
    keeps_mtime = not is_dated(source)
    for _ in range(TRIES - 1):
        try:
            copied = await store.copy(source, key, keeps_mtime=keeps_mtime, condition=condition)
            return source, copied
        except StaleVersionError:
            logger.info("%s has been replaced: what is there now is copied", source.key)
        source = await store.head(source.key)
        keeps_mtime = True
    return source, await store.copy(source, key, keeps_mtime=keeps_mtime, condition=condition)


async def delete_all(
    store: Store, known: Mapping[str, str | None], note: Callable[[int], None] = lambda _count: None
) -> None:
    """Delete objects, the markers of directories after what is in them.

    `known` has their ETags by their keys, None where any is to go: where another
    client has replaced one since, that stays. Markers go without: they are all the
    same, and SeaweedFS refuses an ETag for one whose directory is left alone.
    `note` is called with how many were deleted, as it goes on.

    Raises:
        StoreError: some could not be deleted; all others are.
    """
    ordered = sorted(known, reverse=True)
    etags = {key: etag for key, etag in known.items() if etag and not key.endswith("/")}
    files = [key for key in ordered if not key.endswith("/")]
    markers = [key for key in ordered if key.endswith("/")]
    errors: list[StoreError] = []

    async def delete(batch: list[str]) -> None:
        failed = await store.delete_many(batch, etags)
        note(len(batch) - len(failed))
        errors.extend(failure.error for failure in failed if isinstance(failure.error, StoreError))

    await _each(delete, _batches(files))
    for batch in _batches(markers):
        await delete(batch)
    if errors:
        raise errors[0]


def _batches(keys: list[str]) -> list[list[str]]:
    return [keys[at : at + DELETES_AT_ONCE] for at in range(0, len(keys), DELETES_AT_ONCE)]


def is_copy(copy: ObjectInfo, source: ObjectInfo) -> bool:
    """Whether an object was copied from another as that is now."""
    if copy.size != source.size or copy.mtime_ns < source.mtime_ns:
        return False
    return copy.etag == source.etag or copy.mtime_ns > source.mtime_ns


async def list_all(store: Store, prefix: str) -> list[ObjectInfo]:
    """All objects below a prefix."""
    objects: list[ObjectInfo] = []
    after = ""
    while True:
        page = await store.list_page(prefix, delimiter="", start_after=after)
        objects += page.objects
        if page.next_token is None:
            return objects
        after = page.last


async def _each(work: Callable[[Item], Awaitable[None]], items: Iterable[Item]) -> None:
    """Do something for each, many at a time; the first error ends it."""
    todo = iter(items)
    errors: list[StoreError] = []

    async def go_on() -> None:
        for item in todo:
            try:
                await work(item)
            except StoreError as error:
                errors.append(error)
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(go_on)
    if errors:
        raise errors[0]
