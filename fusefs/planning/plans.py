"""The plans of one mount: the expected next uses of its files.

Each reader has a plan (table.py): one program, or one rank of several. Together the plans decide
which planned file the cache evicts first: the one whose next use is farthest away (Belady, "A study
of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966). Uses in
different plans are compared by the number of entries before them; readers are assumed to be equally
fast.

A plan's text is in a file in the mount's state directory, so that the daemon that takes the mount
over can continue with it; the next opens show the position.
"""

from __future__ import annotations

import logging
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import trio

from fusefs.cache.cached_file import CacheFile, Rank
from fusefs.cache.file_cache import FileCache
from fusefs.linux.clock import steady_time
from fusefs.planning.prefetcher import LATE_FOR, Prefetcher
from fusefs.planning.table import Plan

logger = logging.getLogger("fusefs.planning")

# Limits of all plans together: 200 MB of memory, and space on the cache's disk.
MOST_ENTRIES = 1 << 24
MOST_BYTES = 2 << 30
LONGEST_ENTRY = 4096
MOST_READERS = 256
LONGEST_READER = 100  # the name is hexadecimal in a file's name
# Limits of a recording: opens not fetched yet, opens in one answer, seconds without a request.
MOST_RECORDED = 1 << 20
RECORD_PIECE = 500
RECORD_S = 30.0
# The number of files that `_reorder` places before other tasks have their turn.
FILES_TURN = 500
# The most remembered files that are being opened and were not complete in the cache.
MOST_LATE = 4096
# Bytes of a text that are processed before other tasks have their turn.
TURN = 1 << 16


class PlanError(Exception):
    """A plan can't be accepted; the message is one line for the user."""


class Plans:
    """The plans of one mount, by reader. Belongs to the event loop.

    This class is the `Forecast` (cache/eviction_order.py) that the cache asks at each open and each
    eviction. When plans change, `_reorder` places the files of plans in the order of eviction anew.
    """

    def __init__(
        self, directory: Path, prefix: str, cache: FileCache, prefetcher: Prefetcher
    ) -> None:
        self._directory = directory
        self._prefix = prefix
        self._cache = cache
        self._prefetcher = prefetcher
        self._plans: dict[str, Plan] = {}
        self._adding = trio.Lock()
        self._active: list[Plan] = []
        # The average progress of readers, in entries, so that uses noted at different times can be
        # compared.
        self._clock = 0.0
        self._known: dict[int, CacheFile] = {}  # unpinned files, by the checksums of their keys
        self._late: set[CacheFile] = set()
        self._has_changed = trio.Event()
        self._has_begun = trio.Event()
        self.since = -math.inf
        # Opens of planned files: those in time, and the late ones by reason.
        self.opens = dict.fromkeys(("in_time", *LATE_FOR), 0)
        # The paths opened since the last request for them, None if nobody records; the number of
        # paths before them, and the deadline (monotonic seconds) for the next request.
        self._recorded: list[str] | None = None
        self._told = 0
        self._record_until = 0.0

    # Plans come and go

    async def run(self, goes_on: bool) -> None:
        """Follow the plans until cancelled; if `goes_on`, first restore the last daemon's plans."""
        names = await trio.to_thread.run_sync(self._on_record, goes_on)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._prefetcher.run)
            nursery.start_soon(self._reorder)
            for reader in names:
                await self._restore(reader)
            self._has_begun.set()

    def _on_record(self, goes_on: bool) -> list[str]:
        """Return the readers with saved plans; without `goes_on`, delete the plans. Blocks."""
        try:
            paths = sorted(self._directory.iterdir()) if self._directory.exists() else []
            if not goes_on:
                for path in paths:
                    path.unlink()
                return []
            return [bytes.fromhex(path.name.removeprefix("plan-")).decode() for path in paths]
        except (OSError, ValueError) as error:
            logger.warning("the plans on record can't be read: %s", error)
            return []

    async def _restore(self, reader: str) -> None:
        try:
            plan = await self._open(reader, is_new=False)
            offset = 0
            while text := await trio.to_thread.run_sync(os.pread, plan.fd, TURN, offset):
                offset += len(text)
                self._take_in(plan, text)
                self._prefetcher.moved()
            plan.has_all = True  # so far: `add` may bring more
            logger.info("going on with a plan of %d files", plan.size)
        except OSError as error:
            logger.warning("a plan can't be read again: %s", error)

    async def add(self, reader: str, offset: int, text: bytes, *, is_last: bool) -> dict[str, Any]:
        """Add `text` to a reader's plan at `offset` (0: begin it anew); return the plan's state.

        The text is as in table.py, paths are relative to the mount. `is_last` ends the plan.

        Raises:
            PlanError: the piece can't be accepted; the plan is deleted.
        """
        if len(reader.encode()) > LONGEST_READER:
            raise PlanError(f"the name of a reader has {LONGEST_READER} bytes at most")
        await self._has_begun.wait()
        async with self._adding:
            plan = self._plans.get(reader)
            try:
                if offset == 0:
                    if plan is None and len(self._plans) >= MOST_READERS:
                        raise PlanError(f"there are plans of {MOST_READERS} readers already")
                    was_followed = plan is not None and plan.is_followed
                    self.end(reader)
                    plan = await self._open(reader, is_new=True)
                    plan.is_confirmed = was_followed  # the reader has followed its plans so far
                    self._refresh()
                elif plan is None or plan.text_bytes != offset:
                    raise PlanError("the plan is incomplete, for it was replaced; give it again")
                self._check(plan, text)
                await trio.to_thread.run_sync(_write, plan.fd, text, offset)
            except OSError as error:
                self.end(reader)
                raise PlanError(f"the plan can't be kept: {error.strerror}") from error
            except PlanError:
                self.end(reader)
                raise
            for at in range(0, len(text), TURN):
                self._take_in(plan, text[at : at + TURN])
                await trio.lowlevel.checkpoint()
            plan.has_all = is_last
            self._prefetcher.moved()
            return self._prefetcher.describe(plan)

    def _check(self, plan: Plan, text: bytes) -> None:
        entries = sum(other.size for other in self._plans.values()) + text.count(b"\0")
        if entries > MOST_ENTRIES:
            raise PlanError(f"the plans of a mount have {MOST_ENTRIES:,} entries at most")
        if sum(other.text_bytes for other in self._plans.values()) + len(text) > MOST_BYTES:
            raise PlanError("the plans of a mount have 2 GiB of text at most")
        if any(len(entry) > LONGEST_ENTRY for entry in text.split(b"\0")):
            raise PlanError("an entry is too long for a path: is it a list of paths?")

    async def _open(self, reader: str, *, is_new: bool) -> Plan:
        def open_file() -> int:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if is_new else 0)
            return os.open(self._path(reader), flags, 0o600)

        plan = Plan(reader, self._prefix, await trio.to_thread.run_sync(open_file))
        self._plans[reader] = plan
        self._prefetcher.begin(plan)
        self._refresh()
        return plan

    def _path(self, reader: str) -> Path:
        return self._directory / f"plan-{reader.encode().hex()}"

    def _take_in(self, plan: Plan, text: bytes) -> None:
        """Add entries to a plan; put the files that they name back into the order of eviction."""
        known = self._known
        for mark in plan.add(text):
            file = known.get(mark)
            if file is not None:
                self._cache.put_back(file)

    def end(self, reader: str) -> bool:
        """Delete a reader's plan; return False if there is none."""
        plan = self._plans.pop(reader, None)
        if plan is None:
            return False
        self._prefetcher.end(plan)
        with suppress(OSError):
            self._path(reader).unlink()
        self._refresh()
        return True

    def _refresh(self) -> None:
        """Tell the eviction order and the prefetcher which plans are followed by readers now."""
        self._active = [plan for plan in self._plans.values() if plan.is_followed]
        if not self._active:
            self.since = -math.inf
        elif self.since == -math.inf:
            self.since = steady_time()
        # A plan that is not followed also needs the opens: its reader may start.
        is_needed = bool(self._plans) or self._recorded is not None
        self._cache.order.forecast = self if is_needed else None
        self._has_changed.set()
        self._prefetcher.moved()

    async def _reorder(self) -> None:
        """Place the files of plans anew in the eviction order each time that plans change."""
        while True:
            await self._has_changed.wait()
            self._has_changed = trio.Event()
            for number, file in enumerate(self._cache.files()):
                mark = self._mark(file)
                if mark is not None and self._plans:
                    self._known[mark] = file
                if file.rank is Rank.PLANNED or self.next_use(file) is not None:
                    self._cache.put_back(file)
                if number % FILES_TURN == 0:
                    await trio.lowlevel.checkpoint()
            if not self._plans:
                self._known.clear()

    def record(self, after: int) -> dict[str, Any]:
        """Return the paths of the next recorded opens, from open number `after` on (0: the first).

        The first call starts the recording, which ends after RECORD_S without a call.
        """
        if self._recorded is None:
            self._recorded, self._told = [], after
            self._refresh()
        del self._recorded[: max(0, after - self._told)]
        self._told = max(after, self._told)
        self._record_until = time.monotonic() + RECORD_S
        return {"entries": self._recorded[:RECORD_PIECE], "after": self._told}

    def _note(self, key: str) -> None:
        """Record the open of `key` while a recording runs; end the recording at its deadline."""
        if self._recorded is None:
            return
        if time.monotonic() > self._record_until:
            self._recorded = None
            self._refresh()
        elif len(self._recorded) < MOST_RECORDED:
            self._recorded.append(key[len(self._prefix) :])

    # The forecast

    def _mark(self, file: CacheFile) -> int | None:
        return crc32(file.version.key.encode()) if file.version is not None else None

    def next_use(self, file: CacheFile) -> float | None:
        """Return the time (in entries) of a file's next use; inf if past, None if in no plan."""
        mark = self._mark(file)
        if mark is None:
            return None
        found = math.inf
        for plan in self._active:
            at = plan.find(mark, plan.low)
            if at >= 0:
                found = min(found, self._clock + at - plan.low)
        if found == math.inf and not any(plan.find(mark, 0) >= 0 for plan in self._active):
            return None
        self._known[mark] = file
        return found

    @property
    def frontier(self) -> float:
        """Time (in entries) of the next use to prefetch for; files used later may be evicted."""
        ahead = max((self._prefetcher.frontier(plan) for plan in self._active), default=math.inf)
        return self._clock + ahead

    def opening(self, file: CacheFile) -> bool:
        """Note that a program begins to open a file; return True if a plan has the file."""
        plans, mark = self._plans.values(), self._mark(file) or 0  # hardly the mark of an entry
        may_wait = plans and not file.is_complete and len(self._late) < MOST_LATE
        if may_wait and not any(self._prefetcher.is_there(plan, mark, file) for plan in plans):
            self._late.add(file)
            for plan in plans:  # also those whose first opens wait
                if not plan.is_ignored and plan.distance(mark) < plan.window:
                    plan.late_since = plan.late_since or time.time()
        return self.next_use(file) is not None

    def used(self, file: CacheFile) -> None:
        """Note that a program has opened a file, in the plans and the recording."""
        mark = self._mark(file)
        if file.version is not None:
            self._note(file.version.key)
        if mark is None or not self._plans:
            return
        is_late = file in self._late
        self._late.discard(file)
        distances = {plan: plan.distance(mark) for plan in self._plans.values()}
        nearest = min(distances, key=distances.__getitem__)
        is_again = nearest.has_ranges and mark in nearest.latest  # for another range
        # Only one reader opened the file; it is unknown which if none expects it.
        for plan in (nearest,) if distances[nearest] < nearest.window else distances:
            was_followed, jumps = plan.is_followed, plan.jumps
            moved = plan.opened(mark)
            if was_followed:
                self._clock += moved / max(1, len(self._active))
            if plan.is_followed != was_followed or plan.jumps != jumps:
                self._refresh()
        if distances[nearest] < math.inf and not is_again:
            self.opens[self._prefetcher.opened(nearest, is_late=is_late)] += 1

    def describe(self) -> list[dict[str, Any]]:
        """Return the plans as plain JSON data."""
        return [self._prefetcher.describe(plan) for plan in self._plans.values()]


def _write(fd: int, text: bytes, offset: int) -> None:
    while text:
        done = os.pwrite(fd, text, offset)
        text, offset = text[done:], offset + done
