"""One reader's plan: the paths that it will read, in order, and its position.

A plan may have ten million entries, so entries are not objects. The plan's text is in a file on the
cache's disk: paths, or `/START-STOP/PATH` for a range of bytes, each terminated by a NUL. Ranges of
a file in a row are one entry, because only opens show the position. In memory an entry takes 4
bytes for a checksum of its key and 4 bytes for a link; a hash table in each segment maps a checksum
to its entries. If two keys have the same checksum (one pair in four billion), a file is fetched or
evicted at the wrong time, and nothing else happens.

The *position* follows from the opens. Entries before `low` are done, those in `_seen` were opened
out of order, as several workers do. An open is expected within a window after `low`. An open
elsewhere *strays*; when several in a row stray to one place, the reader has jumped there (a restart
from a checkpoint). When most opens stray, the reader follows another order: the plan is ignored
until a jump is found again. A new plan is *confirmed* by about nine expected opens; until then
nothing is evicted for it, as it may be another job's.
"""

from __future__ import annotations

import math
import os
import re
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from zlib import crc32

# Entries of the first segment, and most entries of a segment.
SMALLEST_SEGMENT = 1 << 14
LARGEST_SEGMENT = 1 << 20
# Entries and bytes of text after which the next entry has its offset in the text recorded.
BLOCK = 64
BLOCK_BYTES = 4 << 20
# Share of the distinct paths by which opens may be out of order, either way: in a random order,
# too, up to half of the opens are then expected. The largest window is about the number of entries
# in all workers' batches.
WINDOW_SHARE = 1 / 4
LEAST_WINDOW = 8
LARGEST_WINDOW = 8192
# Opens in a row that must stray to one place to make it the position.
JUMP_AFTER = 8
# The share of expected opens among about the last RECENT_OPENS: below LEAST_SHARE the plan is
# ignored, above ENOUGH_SHARE it is followed again.
RECENT_OPENS = 32
LEAST_SHARE = 0.75
ENOUGH_SHARE = 0.9
FIRST_SHARE = 0.87  # the initial share of a new plan
# The most entries of one slot that a search looks at.
MOST_LINKS = 256
# Number of opens within which a second open of a file counts as the same use; the number is lower
# for a small data set.
MOST_LATEST = 64
# After this time and this many other opens without an expected open, the plan is ignored.
IDLE_S = 300.0
IDLE_OPENS = 1000
# The most ranges of an entry that are fetched.
MOST_RANGES = 10_000

Ranges = list[tuple[int, int]]
Visit = tuple[str, Ranges]  # a path, and what is read of the file: no ranges for all of it
_RANGE = re.compile(rb"/(\d{1,18})-(\d{1,18})/(.+)", re.DOTALL)


def planned(path: str, span: str) -> str:
    """Return the text for `path`, or for its bytes `span` ("START-STOP", else ValueError)."""
    found = re.fullmatch("([0-9]{1,18})-([0-9]{1,18})", span)
    if span and not (found and int(found[1]) < int(found[2])):
        raise ValueError(f"{span!r} is no range of bytes, START-STOP")
    return f"/{span}/{path}" if span else path


class Segment:
    """Hash table of at most `size` (a power of two) entries of a plan, from `start` on."""

    __slots__ = ("_heads", "_links", "_mask", "marks", "start")

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self._mask = size - 1
        self._heads = array("i", [-1]) * size
        self._links = array("i")
        self.marks = array("I")

    @property
    def room(self) -> int:
        """The number of entries that still fit."""
        return self._mask + 1 - len(self.marks)

    def add(self, marks: Sequence[int]) -> int:
        """Add entries (checksums of keys), `room` at most; return about how many keys are new."""
        heads, links, own, mask, new = self._heads, self._links, self.marks, self._mask, 0
        number = len(own)
        for mark in marks:
            slot = mark & mask
            last = heads[slot]
            new += last < 0 or own[last] != mark
            links.append(last)
            own.append(mark)
            heads[slot] = number
            number += 1
        return new

    def places(self, mark: int, least: int) -> list[int]:
        """Return the positions from `least` on of entries with the checksum `mark`, last first."""
        found, own, links, start = [], self.marks, self._links, self.start
        at = self._heads[mark & self._mask]
        for _ in range(MOST_LINKS):
            if at < 0 or start + at < least:
                break
            if own[at] == mark:
                found.append(start + at)
            at = links[at]
        return found


class Plan:
    """The plan of one reader, whose text is in an open file. Belongs to the event loop.

    `prefix` is the prefix of the mount's keys, `low` the first entry that was not opened. `jumps`
    counts the jumps of the position.
    """

    def __init__(self, reader: str, prefix: str, fd: int) -> None:
        self.reader = reader
        self.fd = fd
        self.size = self.text_bytes = 0
        self.low = self.high = self.jumps = self.skipped = 0
        self.is_ignored = self.is_confirmed = self.has_all = self.has_ranges = False
        self.last_expected = time.monotonic()
        self.late_since: float | None = None  # epoch seconds: every open since then was late
        self._start_mark = crc32(prefix.encode())
        self._rest = b""  # an incomplete entry at the end
        self._segments: list[Segment] = []
        # The positions of some entries, and their offsets in the text.
        self._firsts, self._offsets = array("Q", [0]), array("Q", [0])
        self._next_offset = self._distinct = 0
        self._last_mark = -1
        self._seen: set[int] = set()
        # Positions opened or passed over; the prefetcher clears the list.
        self.passed: list[int] = []
        self._stray: list[int] = []
        self.latest: deque[int] = deque()
        self._share = FIRST_SHARE
        self._others = 0

    def __del__(self) -> None:
        # The file is closed no earlier, because a thread may be reading it.
        os.close(self.fd)

    @property
    def window(self) -> int:
        """Number of entries before and after the farthest open within which opens are expected."""
        return max(LEAST_WINDOW, min(LARGEST_WINDOW, int(WINDOW_SHARE * self._distinct)))

    @property
    def is_followed(self) -> bool:
        """True if the reader opens the files of the plan in the plan's order."""
        return self.is_confirmed and not self.is_ignored

    @property
    def is_done(self) -> bool:
        return self.has_all and self.low >= self.size

    def add(self, text: bytes) -> list[int]:
        """Add the entries in a piece of text, already in the file; return their checksums."""
        *lines, self._rest = (self._rest + text).split(b"\0")
        self.text_bytes += len(text)
        marks: list[int] = []
        number, at, before, start = self.size, self._next_offset, self._last_mark, self._start_mark
        most, end = self._firsts[-1] + BLOCK, self._offsets[-1] + BLOCK_BYTES
        for line in lines:
            found = _RANGE.fullmatch(line) if line[:1] == b"/" else None
            mark = crc32(found[3] if found else line, start)
            if found:
                self.has_ranges = True
            if found is None or mark != before:
                if number >= most or at >= end:
                    self._firsts.append(number)
                    self._offsets.append(at)
                    most, end = number + BLOCK, at + BLOCK_BYTES
                marks.append(mark)
                number += 1
            before = mark
            at += len(line) + 1
        self._next_offset, self._last_mark, rest = at, before, marks
        while rest:
            if not self._segments or not self._segments[-1].room:
                size = max(SMALLEST_SEGMENT, min(LARGEST_SEGMENT, self.size))
                self._segments.append(Segment(self.size, size))
            last = self._segments[-1]
            part, rest = rest[: last.room], rest[last.room :]
            self._distinct += last.add(part)
            self.size += len(part)
        return marks

    def visits(self, start: int, stop: int) -> list[Visit]:
        """Return entries from `start` on, up to `stop`, and `BLOCK` at most. Blocks."""
        block = bisect_right(self._firsts, start) - 1
        offset, following = self._offsets[block], self._offsets[block + 1 : block + 2]
        end = following[0] if following else self._next_offset
        # The last entry lacks ranges if it has more text than BLOCK_BYTES.
        text = os.pread(self.fd, min(end - offset, 2 * BLOCK_BYTES), offset)
        visits: list[Visit] = []
        mark = -1
        for line in text.split(b"\0")[:-1]:
            found = _RANGE.fullmatch(line)
            path = found[3] if found else line
            before, mark = mark, crc32(path, self._start_mark)
            is_new = found is None or mark != before
            if is_new:
                visits.append((path.decode(errors="replace"), []))
            if found and (is_new or 0 < len(visits[-1][1]) < MOST_RANGES):
                visits[-1][1].append((int(found[1]), int(found[2])))
        return visits[start - self._firsts[block] : stop - self._firsts[block]]

    def find(self, mark: int, least: int) -> int:
        """Return the first unopened position from `least` on with the checksum `mark`, or -1."""
        for segment in self._segments:
            if segment.start + len(segment.marks) > least:
                for at in reversed(segment.places(mark, least)):
                    if at not in self._seen:
                        return at
        return -1

    def distance(self, mark: int) -> float:
        """Return the number of entries from the farthest open to the next one of `mark`, or inf."""
        at = self.find(mark, self.low)
        return at - self.high if at >= 0 else math.inf

    def was_opened(self, position: int) -> bool:
        """True if the entry at `position` was opened or passed over."""
        return position < self.low or position in self._seen

    def opened(self, mark: int) -> int:
        """Note the open of the key with checksum `mark`; return how far `low` moved, 0 for a jump.

        An unexpected open moves nothing, unless it shows that the reader has jumped.
        """
        before = self.low
        if mark in self.latest:
            return 0  # opened twice, as by a program that looks at a header first
        self.latest.append(mark)
        # A file may be opened for each of its ranges.
        while len(self.latest) > min(MOST_LATEST, max(self.has_ranges, self._distinct // 8)):
            self.latest.popleft()
        at = self.find(mark, self.low)
        if 0 <= at < self.high + self.window:
            self._expected(at)
            return self.low - before
        if self._is_recent(mark):
            return 0
        if at < 0:
            at = self.find(mark, 0)
        if at >= 0:
            self._strayed(at)
            return 0
        self._others += 1
        idle_s = time.monotonic() - self.last_expected
        self.is_ignored |= self._others > IDLE_OPENS and idle_s > IDLE_S
        return 0

    def _is_recent(self, mark: int) -> bool:
        """True if an entry near the position has this checksum: the file was opened again."""
        least, stop = max(0, self.low - self.window), self.low + self.window
        return any(
            at < stop
            for segment in self._segments
            if segment.start + len(segment.marks) > least and segment.start < stop
            for at in segment.places(mark, least)
        )

    def _expected(self, at: int) -> None:
        self._judge(1.0)
        self._stray.clear()
        self._others = 0
        self.last_expected = time.monotonic()
        self._seen.add(at)
        self.passed.append(at)
        # Entries more than a window behind will not be read any more.
        self.high = max(self.high, at)
        least = self.high - self.window
        while self.low in self._seen or self.low < least:
            if self.low not in self._seen:
                self.skipped += 1
                self._judge(0.0)
                self.passed.append(self.low)
            self._seen.discard(self.low)
            self.low += 1

    def _strayed(self, at: int) -> None:
        self._judge(0.0)
        if self._stray and abs(at - self._stray[0]) > self.window // 2:
            self._stray.clear()
        self._stray.append(at)
        if len(self._stray) >= min(JUMP_AFTER, max(2, self._distinct // 4)):
            self.low, self.high = min(self._stray), max(self._stray)
            self.jumps += 1
            self._seen = set(self._stray)
            self._stray = []
            while self.low in self._seen:
                self._seen.discard(self.low)
                self.low += 1
            self.is_ignored, self.is_confirmed, self._share = False, True, 1.0

    def _judge(self, value: float) -> None:
        self._share += (value - self._share) / RECENT_OPENS
        if self._share < LEAST_SHARE:
            self.is_ignored = True
        elif self._share > ENOUGH_SHARE:
            self.is_ignored, self.is_confirmed = False, True
