"""Claims of volumes by calls: a second call for a volume waits for a limited time, then fails.

Kubelet and the provisioner call again by themselves, and an endless queue would only fill the
server's threads with calls whose caller has long given up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from csi.errors import AbortedError


class Claims:
    """The volumes that have a call under way. Any thread may claim a volume."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._claimed: set[str] = set()

    @contextlib.contextmanager
    def claim(self, volume: str, ends: float = 0.0) -> Iterator[None]:
        """Claim `volume` for the block; wait for another call until `ends` (monotonic clock).

        Raises:
            AbortedError: another call still has the claim at `ends`.
        """
        with self._changed:
            left_s = max(0.0, ends - time.monotonic())
            if not self._changed.wait_for(lambda: volume not in self._claimed, left_s):
                raise AbortedError(f"another call for volume {volume} is under way")
            self._claimed.add(volume)
        try:
            yield
        finally:
            with self._changed:
                self._claimed.discard(volume)
                self._changed.notify_all()
