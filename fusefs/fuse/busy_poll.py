"""Waiting for the next request without going to sleep, while that pays.

To put the event loop to sleep and to wake it up again costs the daemon some 15
microseconds of processor time, and the program that waits for its answer as much
again or more. A program that opens small files, or walks, makes its next request
sooner than that. So the session looks for the next request for up to 50
microseconds before it goes back to the loop.

Time that is spent so is lost to others. So the session keeps an account: a request
that comes in time is worth 50 microseconds, less what was spent to wait for it; one
that does not come costs what was spent. While the account shows a loss, most waits
go without polling, and one in a while tries again: after 16 waits, 32, up to 4,096.
An idle mount has no requests, and polls once after its last one.

A thread that polls where all processors are busy is preempted, and holds up the very
program whose request it waits for. So where the scheduler has preempted it, it is
counted as a loss.
"""

from __future__ import annotations

import os
import resource
import select
import time
from typing import Any

from fusefs.settings.types import BusyPolling

# How long one wait is polled, and what it is worth when a request comes.
LONGEST_NS = 50_000
# The account's bounds: 2 ms, which is how long a loss goes unnoticed.
MOST_NS = 2_000_000
FIRST_PAUSE, LONGEST_PAUSE = 16, 4096
# After a pause so many waits in vain show that it still does not pay.
TRIED_AGAIN = 8
# How often the number of preemptions is read, in polled waits, and what one costs.
PREEMPTIONS_EVERY = 16
PREEMPTION_NS = 200_000


class BusyPoll:
    """Polls one descriptor, which is read by the event loop. Belongs to the event loop.

    `polled`, `hits` and `spent_ns` count the waits that were polled, those in which a request
    came, and the time spent in all of them.
    """

    def __init__(self, fd: int, *, is_always: bool = False) -> None:
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._is_always = is_always
        self._account_ns = 0
        self._pause = FIRST_PAUSE
        self._skipping = 0
        self._preempted = _preemptions()
        self._look_at = PREEMPTIONS_EVERY
        self.polled = self.hits = self.spent_ns = 0

    def finds_request(self) -> bool:
        """Wait up to 50 microseconds for a request, if that pays; whether there is one."""
        if not self.is_worth_it():
            return False
        poll, clock = self._poll.poll, time.perf_counter_ns
        began = clock()
        until = began + LONGEST_NS
        found = poll(0)
        now = began
        while not found:
            now = clock()
            if now >= until:
                break
            found = poll(0)
        self.account(1, bool(found), now - began)
        return bool(found)

    def is_worth_it(self) -> bool:
        """Whether the next wait is to be polled; to be called before each."""
        if not self._skipping:
            return True
        self._skipping -= 1
        if not self._skipping:
            self._preempted = _preemptions()
        return False

    def account(self, polled: int, hits: int, spent_ns: int) -> None:
        """Take into account how some waits went."""
        self.polled += polled
        self.hits += hits
        self.spent_ns += spent_ns
        gain = hits * LONGEST_NS - spent_ns
        if self.polled >= self._look_at:
            self._look_at = self.polled + PREEMPTIONS_EVERY
            preempted = _preemptions()
            gain -= (preempted - self._preempted) * PREEMPTION_NS
            self._preempted = preempted
        self._account_ns = account = min(MOST_NS, self._account_ns + gain)
        if account > 0:
            self._pause = FIRST_PAUSE
        elif account < -MOST_NS and not self._is_always:
            self._account_ns = TRIED_AGAIN * LONGEST_NS - MOST_NS
            self._skipping = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def describe(self) -> dict[str, Any]:
        return {
            "waits": self.polled,
            "hits": self.hits,
            "spent_s": self.spent_ns / 1e9,
        }


def _preemptions() -> int:
    """How often this thread had to give its processor up."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def polling(fd: int, mode: BusyPolling) -> BusyPoll | None:
    """What polls a descriptor as a setting wants it; None for not to poll.

    On the only processor no program could make a request meanwhile.
    """
    if mode is BusyPolling.OFF or len(os.sched_getaffinity(0)) < 2:
        return None
    return BusyPoll(fd, is_always=mode is BusyPolling.ON)
