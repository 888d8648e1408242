"""Freshness: for how long the answer of a LIST is relied on, as NFS does with attributes.

What has changed lately is looked at again soon, what has been still for long is
believed longer. One rule, `belief_s`, decides for a page; listings.py remembers when
a directory changed last, as far as this node can tell: by the Last-Modified of its
objects, by a page that differs from the one before, by an ETag that a GET did not find.

A page is relied on in two ways. Names that it has are shown, with their attributes, for
a second at least, so that `ls -l` costs one LIST. To open a file, to tell that a name is
missing, and to begin to list the directory, it is good for its belief alone, which is
nothing while others change the directory: each such question asks the bucket anew then.
A program that makes file after file asks for each name before it makes it, and is told
from a page of up to a second ago (`Creations`).
"""

from __future__ import annotations

import math

# The first belief. Also for how long names that exist are shown, and missing ones believed.
FIRST_S = 1.0
# After a change by somebody else nothing is relied on for so long: whoever writes a checkpoint
# writes several files, and those that wait for it look at once when they are told.
HOT_S = 10.0
# Where nothing tells of a change, and after one of this mount, a directory counts as changed so
# long ago: neither just now, nor for long still.
QUIET_S = 2 * HOT_S
# What was modified longer ago than this is believed from the first look on for as long as it may:
# an epoch over a data set costs no more requests than with one fixed time.
STILL_S = 3600.0
# Files made in a row, with pauses of less than this after what was done before, by which a program
# is known to make many. To ask for each would nearly double the time and the requests of a small
# file, which is one PUT. Where nodes wait for each other the pause is longer: what the other one
# does takes several requests.
MANY = 8
LONGEST_PAUSE_S = 0.1


def belief_s(still_s: float, before_s: float, most_s: float) -> float:
    """Seconds for which a page is relied on from when it was requested.

    `still_s` is for how long the directory has been unchanged by then, `before_s` the belief
    of the page before if this one shows no change, else 0, and `most_s` the metadata TTL.
    """
    if math.isinf(most_s):
        return most_s
    if still_s < HOT_S:
        return 0.0
    if still_s >= STILL_S:
        return most_s
    return min(most_s, max(FIRST_S, 2 * before_s))


class Creations:
    """The files that programs of this mount have made one after the other."""

    def __init__(self) -> None:
        self._count = 0
        self._latest = -math.inf

    def note(self, now: float, *, is_new: bool) -> None:
        """A file was made (`is_new`), or got into the bucket; in seconds of the monotonic clock."""
        if now - self._latest >= LONGEST_PAUSE_S:
            self._count = 0
        self._count += is_new
        self._latest = now

    def are_many(self, now: float) -> bool:
        """True if a name that is asked for is probably that of the next file to be made."""
        return self._count >= MANY and now - self._latest < LONGEST_PAUSE_S
