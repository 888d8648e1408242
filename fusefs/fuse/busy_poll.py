"""The decision whether to poll for the next request instead of sleeping.

To sleep and wake up takes the event loop some 15 microseconds, and delays the program that waits
for its answer by as much or more. A program that opens small files, or walks a tree, makes its next
request sooner than that. So compiled code (fast_path.c) polls for a request, up to 50 microseconds:
the benchmark `opens1` has 26,500 opens/s with polling, and 15,600 without.

An account shows if polling pays. A poll gains 50 microseconds if a request comes, and costs the
time that it took. Each preemption of the thread by the scheduler costs as well, because polling
then delays the very program whose request it waits for. When the account shows a loss, the next 16
waits are not polled, then 32, up to 4,096, with a new trial after each pause.
"""

from __future__ import annotations

import os
import resource

# The longest time of a poll, and the gain if a request comes.
LONGEST_NS = 50_000
# The account's bounds: 2 ms, the longest loss before polling stops.
MOST_NS = 2_000_000
FIRST_PAUSE, LONGEST_PAUSE = 16, 4096
# After a pause, this many polls without a request show that polling still does not pay.
TRIED_AGAIN = 8
# The number of polled waits between readings of the preemptions, and the cost of a preemption.
PREEMPTIONS_EVERY = 16
PREEMPTION_NS = 200_000


class BusyPoll:
    """Decides by its account which waits are polled. Belongs to the event loop.

    On one processor no wait is polled.
    """

    def __init__(self) -> None:
        self._has_processors = len(os.sched_getaffinity(0)) > 1
        self._account_ns = 0
        self._pause = FIRST_PAUSE
        self._skipping = 0
        self._preempted = _preemptions()
        self._polled, self._look_at = 0, PREEMPTIONS_EVERY

    def is_worth_it(self) -> bool:
        """Return True if the next wait should be polled; must be called once before each wait."""
        if not self._skipping:
            return self._has_processors
        self._skipping -= 1
        if not self._skipping:
            self._preempted = _preemptions()
        return False

    def account(self, polled: int, hits: int, spent_ns: int) -> None:
        """Add `polled` waits to the account, of `spent_ns` in all; `hits` of them got a request."""
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
    """Return how often this thread was preempted (involuntary context switches)."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
