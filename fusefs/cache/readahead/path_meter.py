"""The *width* of the path to the bucket: the number of parallel downloads that is worthwhile.

Every download measures the *latency* of a connection until the first byte and its rate after that.
The bandwidth of the path shows only when the path is full. So the first width assumes a path of ten
gigabits/s: 8 parts on the same machine, 18 if S3 is 30 ms away and a connection brings 90 MB/s.
From then on the width is found by trials, as in TCP: while readers use the whole width, it is
raised by half, and the larger width stays if it brought a tenth more bytes per second.

The width is divided among the readers of large files (`share`), so that each gets a part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

# With sixteen parts from a server on the same machine a first read was a tenth slower than with
# eight, because that many threads delay each other and the reader.
LEAST_WIDTH = 8
# The assumed bandwidth of a machine's network, in bytes a second, before any measurement.
USUAL_BANDWIDTH = 1.25e9
LEAST_SHARE = 2
# A larger width stays if it brings at least this many times the bytes per second.
GAIN = 1.1
# The share of the width that must have been in use for a measurement to count.
BUSY = 0.75
LEAST_ROUND_S = 0.2
# Seconds until the next trial of a larger width, after a trial that did not pay.
HOLD_S = 8.0
# A reader that has read nothing for this long gets no share.
IDLE_S = 2.0
# How fast an old measurement loses weight: the latency is the least of about the last hundred, or
# of more if more than LEAST_WIDTH downloads are running, as these delay each other.
FORGETTING = 0.01
NEWS = 0.1


class PathMeter:
    """Measures the path from the bucket to one mount. Belongs to the event loop.

    The width is at most `most` parts of `part` bytes; the shares of many readers may add up to
    more. `latency_s` (seconds) and `rate` (bytes a second, of one connection) are 0 until they
    have been measured.
    """

    def __init__(self, most: int, part: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.latency_s = 0.0
        self.rate = 0.0
        self._least_rate = 0.0  # a rate that includes the latency; small downloads show no other
        self.clock = clock
        self._part = part
        self._most = max(1, most)
        self._width = 0  # 0 until the first round has been measured
        self._base = (0, 0.0)  # the width before the last trial, and its bytes per second
        self._next_trial = 0.0
        self._is_trial = False
        self._running = 0  # bytes of running downloads
        self._under_way = 0  # running downloads
        self._readers: dict[object, float] = {}  # with the time of each one's last read
        self._begin_round()

    @property
    def width(self) -> int:
        """The number of parts to download at a time, for all readers together."""
        first = LEAST_WIDTH
        if self.rate and not self._width:
            duration_s = self.latency_s + self._part / self.rate
            first = max(LEAST_WIDTH, round(USUAL_BANDWIDTH * duration_s / self._part))
        return min(self._most, self._width or first)

    @property
    def bandwidth(self) -> float:
        """The estimated bandwidth of all connections together, in bytes a second."""
        return self._base[1] or (self.rate or self._least_rate) * LEAST_WIDTH

    def share(self, reader: object) -> int:
        """Note that `reader` reads now; return the number of parts to download for it at a time."""
        now = self.clock()
        self._readers[reader] = now
        for other in [each for each, at in self._readers.items() if now - at > IDLE_S]:
            del self._readers[other]
        return max(LEAST_SHARE, self.width // len(self._readers))

    def leaves(self, reader: object) -> None:
        """Remove a reader that has ended, so that the others get its share of the width."""
        self._readers.pop(reader, None)

    def change(self, downloads: int, size: int) -> None:
        """Add `downloads` of `size` bytes in total to the running ones; negative: subtract them."""
        self._count_running()
        self._running += size
        self._under_way += downloads

    def arrived(self, size: int) -> None:
        """Count `size` bytes from any download; end the measuring round after enough bytes."""
        self._arrived += size
        if self._arrived >= self.width * self._part:
            self._end_round()

    def note_first(self, size: int, waited_s: float) -> None:
        """Update the latency: the first `size` bytes of a download came after `waited_s`."""
        self._least_rate = max(self._least_rate, size / max(waited_s, 1e-6))
        latency_s = max(1e-6, waited_s - (size / self.rate if self.rate else 0.0))
        if not self.latency_s or latency_s < self.latency_s:
            self.latency_s = latency_s
        else:
            self.latency_s *= 1 + FORGETTING * min(1.0, LEAST_WIDTH / max(1, self._under_way))

    def note_rest(self, size: int, elapsed_s: float) -> None:
        """Update the rate: the `size` bytes after a download's first bytes took `elapsed_s`."""
        rate = size / max(elapsed_s, 1e-6)
        self.rate += (rate - self.rate) * NEWS if self.rate else rate

    def _begin_round(self) -> None:
        self._round_began = self._counted_until = self.clock()
        self._busy = 0.0
        self._arrived = 0

    def _count_running(self) -> None:
        now = self.clock()
        self._busy += self._running * (now - self._counted_until)
        self._counted_until = now

    def _end_round(self) -> None:
        self._count_running()
        elapsed_s = self._counted_until - self._round_began
        if elapsed_s < max(LEAST_ROUND_S, 3 * self.latency_s):
            return
        width, arrived = self.width, self._arrived
        is_full = self._busy >= BUSY * width * self._part * elapsed_s
        self._begin_round()
        if is_full:
            self._judge(width, arrived / elapsed_s)

    def _judge(self, width: int, brought: float) -> None:
        """Choose the next width; a round that used all of `width` gave `brought` bytes a second."""
        base, base_brought = self._base
        if self._is_trial and brought < GAIN * base_brought:
            self._width, self._is_trial = base, False
            self._next_trial = self._round_began + HOLD_S
            return
        self._base = width, brought
        self._is_trial = self._round_began >= self._next_trial and width < self._most
        self._width = min(self._most, width + width // 2) if self._is_trial else width


class DownloadMeter:
    """Context manager that measures one download of `size` bytes."""

    __slots__ = ("_began", "_first_at", "_last_at", "_path", "_rest", "_size")

    def __init__(self, path: PathMeter, size: int) -> None:
        self._path = path
        self._size = size
        self._began = path.clock()
        self._first_at = self._last_at = 0.0
        self._rest = 0

    def __enter__(self) -> Self:
        self._path.change(1, self._size)
        return self

    def __exit__(self, *_: object) -> None:
        self._path.change(-1, -self._size)
        # A few bytes say little: they came together with the first bytes.
        if self._rest > self._size // 2:
            self._path.note_rest(self._rest, self._last_at - self._first_at)

    def arrived(self, size: int) -> None:
        """Count `size` more bytes of the download."""
        self._last_at = self._path.clock()
        if self._first_at:
            self._rest += size
        else:
            self._first_at = self._last_at
            self._path.note_first(size, self._last_at - self._began)
        self._path.arrived(size)
