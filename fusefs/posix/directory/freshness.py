"""Freshness: the time for which a LIST page is relied on, as NFS does with attributes.

A page of a directory that changed recently expires soon, and a page of one that has not
changed for long is used longer. `belief_s` computes this time, the page's *belief*;
listings.py remembers when a directory changed last, as far as this mount can tell: by its
objects' Last-Modified, a page that differs from the page before, a GET that found another ETag.

A page is used in two ways. Its names are shown, with their attributes, for at least a second, so
that `ls -l` costs one LIST. To open a file, to tell that a name is missing, and to begin to list
the directory, a page is used only for its belief, which is 0 while others change the directory:
then each of these sends a request. A program that creates file after file looks each name up before
it creates the file; such lookups are answered from a page of up to a second ago (`Creations`).
"""

from __future__ import annotations

import math

# The first belief. Also the least time for which names are shown, and the most for which a
# missing name is relied on.
FIRST_S = 1.0
# For this long after a change by another client no page is relied on: a checkpoint consists of
# several files, and programs that wait for it look as soon as they are notified.
HOT_S = 10.0
# If no change is known, and after a change by this mount, a directory counts as changed this long
# ago: neither just now, nor long ago.
QUIET_S = 2 * HOT_S
# A directory whose last change is older than this is relied on for the whole metadata TTL at
# once: an epoch over a data set costs no more requests than with a fixed time.
STILL_S = 3600.0
# A program counts as creating many files after MANY in a row, with a pause shorter than
# LONGEST_PAUSE_S after each. A LIST for each file would nearly double the time and the requests of
# a small file, which is one PUT. If machines wait for each other the pauses are longer, as the
# other machine's work takes several requests.
MANY = 8
LONGEST_PAUSE_S = 0.1


def belief_s(still_s: float, before_s: float, most_s: float) -> float:
    """The seconds for which a LIST page is relied on, counted from the page's request.

    `still_s` is the time since the directory's last change, `before_s` the belief of the
    previous page if this one shows no change, else 0, and `most_s` the metadata TTL.
    """
    if math.isinf(most_s):
        return most_s
    if still_s < HOT_S:
        return 0.0
    return most_s if still_s >= STILL_S else min(most_s, max(FIRST_S, 2 * before_s))


class Creations:
    """Detects from this mount's changes that programs are creating file after file."""

    def __init__(self) -> None:
        self._count = 0
        self._latest = -math.inf

    def note(self, now: float, *, is_new: bool) -> None:
        """Note a change at `now` (monotonic s); creations (`is_new`) count, and a pause resets."""
        if now - self._latest >= LONGEST_PAUSE_S:
            self._count = 0
        self._count += is_new
        self._latest = now

    def are_many(self, now: float) -> bool:
        """True if a name looked up now is probably about to be created: MANY files just were."""
        return self._count >= MANY and now - self._latest < LONGEST_PAUSE_S
