"""Who goes first when connections are scarce."""

from __future__ import annotations

import enum
from collections.abc import Callable


class Priority(enum.IntEnum):
    """Who goes first when connections are scarce; lower goes first."""

    DEMAND = 0
    WRITE = 1
    PREFETCH = 2


# A download's priority is asked for when a connection is free: it rises when a
# reader joins what a prefetch has started.
Urgency = Callable[[], Priority]


def demanded() -> Priority:
    """The urgency of what somebody waits for."""
    return Priority.DEMAND
