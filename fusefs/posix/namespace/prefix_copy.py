"""Server-side copies of all objects below a prefix to another prefix, many at a time.

An object that exists below the new prefix may count as a copy, so that an interrupted run can be
continued. It may be a copy if it has the same size as the source and is not older, by the bucket's
own clock; within the same second, only if it has the same ETag as well. A source is copied again
unless its copy has the same ETag: another client may have replaced the content during the copy.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

from fusefs.posix.nodes import names
from fusefs.posix.nodes.object_metadata import SECOND_NS
from fusefs.posix.tasks import for_each
from fusefs.store.contract import Store, find
from fusefs.store.errors import NotFoundError, StaleVersionError, StoreError, UnreachableError
from fusefs.store.interface import Condition, Expect, ObjectInfo, ObjectVersion, Revision, Write
from fusefs.store.s3.head import sendable

logger = logging.getLogger("fusefs.renaming")

# `Relocator.dating`.
Dating = Callable[[ObjectInfo], Revision | None]

# The most copies, or delete requests, at a time. A copy is a request or two; the store may have
# fewer connections than this.
AT_ONCE = 64
# Keys in a delete request. S3 takes a thousand, but several smaller requests run at the same time.
DELETES_AT_ONCE = 250
# Attempts at copying an object that other clients keep replacing; the last version counts.
TRIES = 3


class PrefixCopy:
    """The copies of all objects below the prefix `old` to keys below the prefix `new`.

    `empty` is an empty file's fd, for markers. `dating` returns the function that adds an object's
    modification time to its copy's metadata. `sources` are the objects that were copied and `made`
    the copies, by the old key; `total` counts the objects to copy. StoreError is raised if a
    request fails.
    """

    def __init__(self, store: Store, old: str, new: str, empty: int, dating: Dating) -> None:
        self._store = store
        self.old = old
        self.new = new
        self._empty = empty
        self._dating = dating
        self.sources: dict[str, ObjectInfo] = {}
        self.made: dict[str, ObjectInfo] = {}
        self.total = 0
        # True if the old directory's marker was deleted, or may have been.
        self._may_lack_marker = False
        # The sources of failed copy requests of which an attempt got no answer.
        self._unanswered: dict[str, ObjectInfo] = {}
        # The objects still to be deleted below the old prefix; None before the first attempt.
        self._left: dict[str, ObjectInfo] | None = None
        self._folders: set[str] = set()

    def target(self, key: str) -> str:
        return self.new + key[len(self.old) :]

    def by_version(self) -> dict[ObjectVersion, ObjectInfo]:
        return {source.version: self.made[key] for key, source in self.sources.items()}

    def newest_copy_ns(self) -> int:
        """The latest Last-Modified (ns) of the copies, except markers, whose time is not S3's."""
        copies = (info.mtime_ns for info in self.made.values() if not _is_marker(info))
        return max(copies, default=0)

    def folders(self) -> set[str]:
        """The old directories without a marker, to be deleted as well: some servers list them."""
        folders = {self.old}
        for key in self.sources:
            at = key.rfind("/")
            while at >= len(self.old) and key[: at + 1] not in folders:
                folders.add(key[: at + 1])
                at = key.rfind("/", 0, at)
        return folders - self.sources.keys()

    async def recall(self) -> list[ObjectInfo]:
        """Find an earlier run's copies, for `copy_all`; return the objects below the old prefix."""
        listed, _, pairs = await self._list_both()
        for source, copy in pairs:
            if copy.etag == source.etag:
                self.sources[source.key], self.made[source.key] = source, copy
        return listed

    async def recall_made(self, until_ns: int | None) -> None:
        """Find the copies that an earlier run has made, and put them in `made`, for `undo`.

        Objects with a Last-Modified after `until_ns` are left out, except markers.
        """
        listed, there, pairs = await self._list_both()
        for source, copy in pairs:
            if _is_marker(copy) or _is_until(copy, until_ns):
                self.made[source.key] = copy
        if self.old in there and self.old not in {info.key for info in listed}:
            self.made[self.old] = there[self.old]
            self._may_lack_marker = True

    async def recall_sources(self, until_ns: int | None) -> None:
        """Find the objects that an earlier run has copied, for `delete_sources`.

        Objects with a Last-Modified after `until_ns` are left out.
        """
        listed, _, pairs = await self._list_both()
        self.sources = {one.key: one for one, _ in pairs if _is_until(one, until_ns)}
        self.total = len(self.sources)
        self._left = dict(self.sources)
        self._folders = self.folders() - {info.key for info in listed}

    async def _list_both(
        self,
    ) -> tuple[list[ObjectInfo], dict[str, ObjectInfo], list[tuple[ObjectInfo, ObjectInfo]]]:
        """List both prefixes; return all objects below `old`, all below `new`, and the copies.

        The second result maps each object's key, with `old` in place of `new`, to the object. The
        third has a pair (source, copy) for each object below `new` that may be a copy (`_is_copy`).
        """
        listed = await list_all(self._store, self.old)
        below = await list_all(self._store, self.new)
        there = {self.old + info.key[len(self.new) :]: info for info in below}
        found = ((source, there.get(source.key)) for source in listed)
        pairs = [(one, copy) for one, copy in found if copy is not None and _is_copy(copy, one)]
        return listed, there, pairs

    async def copy_all(self, listed: Iterable[ObjectInfo] | None = None) -> None:
        """Copy all objects below the old prefix to the new one.

        `listed` are the objects below the old prefix, None to list them. OSError if a key would
        become too long; after another error some objects may have been copied.
        """
        if listed is None:
            listed = await list_all(self._store, self.old)
        found = {info.key: info for info in listed}
        self.check_length(found)
        self.total = len(found)
        todo = [info for info in found.values() if info.key not in self.sources]
        # The markers of directories from the top down, and before the objects in them: servers
        # that create directories for keys would race with the markers, and both would fail.
        markers = [info for info in todo if _is_marker(info)]
        for _, level in groupby(sorted(markers, key=_depth), key=_depth):
            await for_each(self._copy, list(level), AT_ONCE)
        await for_each(self._copy, [info for info in todo if not _is_marker(info)], AT_ONCE)

    def check_length(self, keys: Iterable[str]) -> None:
        """Raise ENAMETOOLONG if one of the keys is too long below the new prefix."""
        for key in keys:
            if key.startswith(self.old) and len(self.target(key).encode()) > names.LONGEST_KEY:
                raise OSError(errno.ENAMETOOLONG, f"{self.target(key)} has more than 1,024 bytes")

    async def _copy(self, source: ObjectInfo) -> None:
        key, target = source.key, self.target(source.key)
        try:
            if _is_marker(source):
                made = await self._make_marker(key, target)
            else:
                source, made = await copy_current(
                    self._store, source, target, self._dating, Expect(None)
                )
        except NotFoundError:
            self.total -= 1  # another client has removed it meanwhile
            return
        except StoreError as error:
            if error.may_be_done or isinstance(error, UnreachableError):
                self._unanswered[key] = source
            raise
        self.sources[key], self.made[key] = source, made

    async def _make_marker(self, source: str, key: str) -> ObjectInfo:
        """Put a copy of the marker `source` under `key`, as not every server can copy markers."""
        marker = await self._store.head(source)
        write = Write(sendable(marker.metadata or {}), marker.content_type, Expect(None))
        return await self._store.put_file(key, self._empty, 0, write)

    async def undo(self, *, keep: str = "") -> None:
        """Delete the copies, except the one under the key `keep`; first restore the old marker."""
        await self._recall_unanswered()
        if self._may_lack_marker:
            await self._put_marker_back()
        keys = {copy.key: key for key, copy in self.made.items() if copy.key != keep}

        def note(gone: list[str]) -> None:
            for target in gone:
                del self.made[keys[target]]

        known = {target: _etag_to_delete(self.made[key]) for target, key in keys.items()}
        await delete_all(self._store, known, note)

    async def _recall_unanswered(self) -> None:
        """Add to `made` the copies that requests without an answer have made, or may still make."""
        for key, source in list(self._unanswered.items()):
            target = self.target(key)
            found = await find(self._store, target) or replace(source, key=target)
            # An object with another ETag may be another client's.
            if found.etag == source.etag and found.size == source.size:
                self.made[key] = found
            del self._unanswered[key]

    async def delete_marker(self) -> None:
        """Delete the old directory's own marker."""
        marker = self.sources.get(self.old)
        self._may_lack_marker = marker is not None
        await self._store.delete(self.old, marker.etag if marker else None)

    async def _put_marker_back(self) -> None:
        """Restore the old directory's marker, if it is gone, before its copy is deleted."""
        copy = self.made.get(self.old)
        if copy is not None and await find(self._store, self.old) is None:
            if _is_marker(copy):
                await self._make_marker(copy.key, self.old)
            else:
                await self._store.copy(copy, self.old, Write(condition=Expect(None)))
        self._may_lack_marker = False

    async def delete_sources(self, note: Callable[[int], None]) -> None:
        """Delete the objects that were copied; `note` is called with the count of each batch.

        A further call tries to delete the remaining objects, unless they have changed.
        """
        if self._left is None:
            self._left, self._folders = dict(self.sources), self.folders()
        else:
            listed = {info.key: info for info in await list_all(self._store, self.old)}
            self._folders -= listed.keys()  # these have got markers since
            self._left = {
                key: source
                for key, source in self._left.items()
                if key in listed and _is_unchanged(listed[key], source)
            }
        left = self._left

        def note_gone(gone: list[str]) -> None:
            note(len(gone))
            for key in gone:
                del left[key]

        known = {key: _etag_to_delete(source) for key, source in left.items()}
        await delete_all(self._store, known, note_gone)
        await delete_all(self._store, dict.fromkeys(self._folders))


def _is_marker(info: ObjectInfo) -> bool:
    return info.key.endswith("/") and not info.size


def _etag_to_delete(info: ObjectInfo) -> str | None:
    """The ETag as a condition of a delete; None for a marker, for which SeaweedFS may refuse it."""
    return None if _is_marker(info) else info.etag


def _depth(info: ObjectInfo) -> int:
    return info.key.count("/")


async def copy_current(
    store: Store, source: ObjectInfo, key: str, dating: Dating, condition: Condition = None
) -> tuple[ObjectInfo, ObjectInfo]:
    """Copy an object's latest version, with its mtime; return (the copied version, the copy)."""
    for _ in range(TRIES - 1):
        write = Write(condition=condition, revise=dating(source))
        with suppress(StaleVersionError):
            return source, await store.copy(source, key, write)
        logger.info("%s has been replaced: what is there now is copied", source.key)
        source = await store.head(source.key)
    write = Write(condition=condition, revise=dating(source))
    return source, await store.copy(source, key, write)


async def delete_all(
    store: Store,
    known: Mapping[str, str | None],
    note: Callable[[list[str]], None] = lambda _gone: None,
) -> None:
    """Delete objects; the marker of a directory is deleted after the objects in it.

    `known` maps each key to an ETag: an object with another ETag stays, as another client has
    put it there since; None deletes any object. `note` is called with the deleted keys of each
    batch. The first error is raised at the end.
    """
    ordered = sorted(known, reverse=True)
    etags = {key: etag for key, etag in known.items() if etag}
    files = [key for key in ordered if not key.endswith("/")]
    markers = [key for key in ordered if key.endswith("/")]
    errors: list[Exception] = []

    async def delete(batch: list[str]) -> None:
        failures = await store.delete_many(batch, etags)
        failed = {failure.key for failure in failures}
        note([key for key in batch if key not in failed])
        errors.extend(failure.error for failure in failures)

    await for_each(delete, _batches(files), AT_ONCE)
    for batch in _batches(markers):
        await delete(batch)
    if errors:
        raise errors[0]


def _batches(keys: list[str]) -> list[list[str]]:
    return [keys[at : at + DELETES_AT_ONCE] for at in range(0, len(keys), DELETES_AT_ONCE)]


def _is_copy(copy: ObjectInfo, source: ObjectInfo) -> bool:
    """True if `copy` may be a copy of `source`, the present version of another object."""
    if copy.size != source.size or copy.mtime_ns < source.mtime_ns:
        return False
    return copy.etag == source.etag or copy.mtime_ns > source.mtime_ns


def _is_unchanged(found: ObjectInfo, known: ObjectInfo) -> bool:
    """True if version and time (to the second, as not all answers have fractions) are the same."""
    is_as_old = found.mtime_ns // SECOND_NS == known.mtime_ns // SECOND_NS
    return is_as_old and found.version == known.version


def _is_until(info: ObjectInfo, until_ns: int | None) -> bool:
    """True if an object's Last-Modified is at most `until_ns`, to the second; None is no limit."""
    return until_ns is None or info.mtime_ns // SECOND_NS <= until_ns // SECOND_NS


async def list_all(store: Store, prefix: str) -> list[ObjectInfo]:
    """List all objects below a prefix; StoreError if the store's answers lack keys or ETags."""
    objects: list[ObjectInfo] = []
    after = ""
    while True:
        page = await store.list_page(prefix, delimiter="", start_after=after)
        objects += page.objects
        odd = next((info.key for info in page.objects if not info.etag), prefix)
        if page.unnamed or odd != prefix:
            raise StoreError(f"the store does not tell what {odd} is")
        if page.next_token is None:
            return objects
        after = page.last
