"""Waiting for the next request without going to sleep, while that pays.

To sleep and to wake up again costs the event loop some 15 microseconds, and the program that waits
for its answer as much or more; a program that opens small files, or walks, makes its next request
sooner. So compiled code (fast_path.c) looks for it for up to 50 microseconds: `opens1` of the bench
is 26,500 opens/s with that, and 15,600 without.

An account tells whether it pays: a request that comes in time is worth 50 microseconds, less what
was spent to wait for it; one that does not come costs what was spent, and so does it where the
scheduler has preempted the thread, which holds up the very program whose request it waits for.
While the account shows a loss, most waits go without polling, and one in a while tries again: after
16 waits, 32, up to 4,096.
"""

from __future__ import annotations

import os
import resource

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
    """The account of polled waits; one processor polls none. Belongs to the event loop."""

    def __init__(self) -> None:
        self._has_processors = len(os.sched_getaffinity(0)) > 1
        self._account_ns = 0
        self._pause = FIRST_PAUSE
        self._skipping = 0
        self._preempted = _preemptions()
        self._polled, self._look_at = 0, PREEMPTIONS_EVERY

    def is_worth_it(self) -> bool:
        """True if the next wait is to be polled; to be called before each."""
        if not self._skipping:
            return self._has_processors
        self._skipping -= 1
        if not self._skipping:
            self._preempted = _preemptions()
        return False

    def account(self, polled: int, hits: int, spent_ns: int) -> None:
        """Take into account how some waits went: in how many of them a request came."""
        self._polled += polled
        gain = hits * LONGEST_NS - spent_ns
        if self._polled >= self._look_at:
            self._look_at = self._polled + PREEMPTIONS_EVERY
            preempted = _preemptions()
            gain -= (preempted - self._preempted) * PREEMPTION_NS
            self._preempted = preempted
        self._account_ns = account = min(MOST_NS, self._account_ns + gain)
        if account > 0:
            self._pause = FIRST_PAUSE
        elif account < -MOST_NS:
            self._account_ns = TRIED_AGAIN * LONGEST_NS - MOST_NS
            self._skipping = self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)


def _preemptions() -> int:
    """The number of times that this thread had to give its processor up."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
