"""Selection of objects by a path, a pattern or a list of paths: for `fusefs warm` and the like.

All objects are found by listings, so no node is made for the kernel. A path stands for
a file, or for all files below a directory, which is listed without delimiter: a thousand
keys a page, in any number of directories. A pattern is matched level by level to its
last part or its first `**`; it may match files and directories (settings/patterns.py). A
path that exists is not taken for a pattern, even if it has a pattern's characters.

The paths of a list are sorted. Listings look up neighbouring keys, as long as each page has enough
of them; the other keys get a HEAD each, many at a time. A path that is no object is listed alone.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import trio

from fusefs.cache.catalog import is_text
from fusefs.posix.directory.segment import LAST_CHARACTER
from fusefs.posix.nodes import names
from fusefs.settings.patterns import compiled, is_pattern, matched
from fusefs.store.contract import Store
from fusefs.store.errors import NotFoundError, StoreError
from fusefs.store.interface import ListPage, ObjectInfo

# The number of concurrent listings: few, so that programs' requests need not wait for them.
LISTINGS = 2
# The number of concurrent requests for a list: at 20 ms each, enough to fetch small files.
LOOK_UPS = 32
# The number of a list's paths that are delivered together: one sync writes all their pins.
RUN = 1000
# The number of HEADs that cost as much as a page of a listing (AWS: 12, and the page's bytes).
WORTH = 16

NO_SUCH = "there is no such file or directory in the bucket"


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of all objects; `number` counts from 0."""

    number: int
    count: int

    def has(self, key: str) -> bool:
        """True if this part has the key, which a hash decides: all parts have similar sizes."""
        digest = blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.count == self.number


@dataclass(frozen=True, slots=True)
class Selected:
    """A batch of `objects`; `roots`: keys of the selected paths whose first objects it has."""

    objects: list[ObjectInfo]
    roots: list[str]


Deliver = Callable[[Selected], Awaitable[None]]
# A function for lines without objects: gets a line's number, its path, and the error.
Miss = Callable[[int, str, StoreError], None]


class Selector:
    """A selector of objects of one mount, whose keys begin with `prefix`. For the event loop."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._listing = trio.CapacityLimiter(LISTINGS)
        self._looking_up = trio.CapacityLimiter(LOOK_UPS)

    async def select(self, path: str, deliver: Deliver) -> None:
        """Call `deliver` with all objects at or below a path of the mount, or a pattern's matches.

        The path "" is the mount's root. Objects that the mount does not show are left out.

        Raises:
            NotFoundError: no object is at or below the path, or matches the pattern.
            StoreError: the bucket can't be listed.
        """
        await self._select(path, deliver, self._listing)

    async def _select(self, path: str, deliver: Deliver, limiter: trio.CapacityLimiter) -> None:
        key = self._prefix + path if path else self._prefix.rstrip("/")
        if not is_text(key):
            raise NotFoundError(NO_SUCH)
        try:
            await self._tree(key, deliver, limiter)
        except NotFoundError:
            if not is_pattern(path):
                raise NotFoundError(NO_SUCH) from None
            if not await self._matches(path.split("/"), deliver):
                raise NotFoundError("nothing in the bucket matches") from None

    async def select_lines(
        self, lines: Sequence[tuple[int, str]], deliver: Deliver, miss: Miss
    ) -> None:
        """Call `deliver` with the objects at or below many paths; `lines` are (number, path).

        `miss` is called for paths that do not exist or can't be looked up. An object is
        delivered twice if the list has both the object and a directory above it.
        """
        numbers: dict[str, int] = {}
        for number, path in lines:
            if not path or self._is_shown(self._prefix + path):
                numbers.setdefault(path, number)
            else:
                miss(number, path, NotFoundError(NO_SUCH))

        async def head(path: str, found: list[ObjectInfo], others: list[str]) -> None:
            try:
                async with self._looking_up:
                    found.append(await self._store.head(self._prefix + path))
            except NotFoundError:
                others.append(path)  # a directory, or a pattern
            except StoreError as error:
                miss(numbers[path], path, error)

        async def select(path: str) -> None:
            try:
                await self._select(path, deliver, self._looking_up)
            except StoreError as error:
                miss(numbers[path], path, error)

        paths = sorted(numbers)
        for at in range(0, len(paths), RUN):
            run = paths[at : at + RUN]
            found, count = await self._neighbours(run)
            keys = {info.key for info in found}
            others = [path for path in run[:count] if self._prefix + path not in keys]
            async with trio.open_nursery() as nursery:
                for path in run[count:]:
                    nursery.start_soon(head, path, found, others)
            if found:
                await deliver(Selected(self._shown(found), [info.key for info in found]))
            async with trio.open_nursery() as nursery:
                for path in others:
                    nursery.start_soon(select, path)

    async def _neighbours(self, paths: Sequence[str]) -> tuple[list[ObjectInfo], int]:
        """Look up the first of sorted `paths` by listings, as long as each page has enough of them.

        Returns the objects, and the number of paths that were looked up.
        """
        keys, found, at = [self._prefix + path for path in paths], list[ObjectInfo](), 0
        while len(keys) - at >= WORTH:
            common = os.path.commonprefix([keys[at], keys[-1]])  # noqa: RUF071 - keys are strings
            before = keys[at][:-1]  # few keys are between this string and `keys[at]`
            after = before if len(before) > len(common) else ""
            try:
                async with self._looking_up:
                    page = await self._store.list_page(common, delimiter="", start_after=after)
            except StoreError:
                break
            stop = bisect_right(keys, page.last, at) if page.next_token else len(keys)
            wanted = set(keys[at:stop])
            found += [info for info in page.objects if info.key in wanted]
            is_worth, at = stop - at >= WORTH, stop
            if not is_worth:
                break
        return found, at

    # Paths

    async def _tree(self, key: str, deliver: Deliver, limiter: trio.CapacityLimiter) -> None:
        """Deliver the objects below the directory `key` or, if there are none, the object `key`."""
        is_root = key == self._prefix.rstrip("/")
        prefix = self._prefix if is_root else key + "/"
        after = ""
        while True:
            async with limiter:
                page = await self._store.list_page(prefix, delimiter="", start_after=after)
                if not page.objects and not after and not is_root:
                    page = ListPage([await self._store.head(key)], [], None, key)
            await deliver(Selected(self._shown(page.objects), [] if after else [key]))
            if page.next_token is None:
                return
            after = page.last

    def _shown(self, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
        return [info for info in objects if info.etag and self._is_shown(info.key)]

    def _is_shown(self, key: str) -> bool:
        path = key[len(self._prefix) :].split("/")
        is_private = names.is_private(self._prefix, path[0])
        is_private = is_private or any(names.is_private("/", name) for name in path[1:])
        return not is_private and all(names.is_expressible(name) for name in path)

    # Patterns

    async def _matches(self, parts: Sequence[str], deliver: Deliver) -> bool:
        """Deliver the objects that match a pattern; return False if no object does."""
        found = False

        async def note(selected: Selected) -> None:
            nonlocal found
            found = found or bool(selected.objects)
            await deliver(selected)

        await self._level(self._prefix, parts, note)
        return found

    async def _level(self, prefix: str, parts: Sequence[str], deliver: Deliver) -> None:
        """Deliver the objects below `prefix`, which ends in a slash, that match `parts`."""
        literal = 0
        while literal < len(parts) and not is_pattern(parts[literal]):
            literal += 1
        prefix += "".join(part + "/" for part in parts[:literal])
        parts = parts[literal:]
        if not parts:
            try:
                await self._tree(prefix.removesuffix("/"), deliver, self._listing)
            except NotFoundError:
                return
        elif parts[0] == "**":
            await self._flat(prefix, parts, deliver)
        else:
            await self._names(prefix, parts, deliver)

    async def _names(self, prefix: str, parts: Sequence[str], deliver: Deliver) -> None:
        """Deliver files in `prefix` that match `parts`; call `_level` for matching directories."""
        pattern = compiled(parts[0])
        assert pattern is not None
        begin = prefix + re.split(r"[*?[]", parts[0], maxsplit=1)[0]
        after = ""
        while True:
            async with self._listing:
                page = await self._store.list_page(begin, start_after=after)
            files = []
            if len(parts) == 1:
                shown = self._shown(page.objects)
                files = [info for info in shown if pattern.match(info.key[len(prefix) :])]
            if files:
                await deliver(Selected(files, [info.key for info in files]))
            for below in page.prefixes:
                if pattern.match(below[len(prefix) : -1]):
                    await self._level(below, parts[1:], deliver)
            if page.next_token is None:
                return
            # Some servers list a directory again if it is the start of the next page.
            after = page.last + (LAST_CHARACTER if page.last.endswith("/") else "")

    async def _flat(self, prefix: str, parts: Sequence[str], deliver: Deliver) -> None:
        """Deliver the objects below `prefix` that match `parts`, which begin with `**`."""
        patterns = [compiled(part) for part in parts]
        after, last = "", None
        while True:
            async with self._listing:
                page = await self._store.list_page(prefix, delimiter="", start_after=after)
            objects, roots = [], []
            for info in self._shown(page.objects):
                path = info.key[len(prefix) :].split("/")
                if count := matched(path, patterns):
                    objects.append(info)
                    root = prefix + "/".join(path[:count])
                    if root != last:
                        roots.append(root)
                        last = root
            if objects:
                await deliver(Selected(objects, roots))
            if page.next_token is None:
                return
            after = page.last
