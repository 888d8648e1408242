"""One call at a time for each volume: the second is refused, not queued.

Kubelet and the provisioner call again by themselves, and a queue would only
fill the server's threads with calls whose caller has long given up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from csi.errors import AbortedError


class Claims:
    """Which volumes have a call under way. Any thread may claim."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claimed: set[str] = set()

    @contextlib.contextmanager
    def claim(self, volume: str) -> Iterator[None]:
        """Have `volume` to oneself.

        Raises:
            AbortedError: somebody else has it.
        """
        with self._lock:
            if volume in self._claimed:
                raise AbortedError(f"another call for volume {volume} is under way")
            self._claimed.add(volume)
        try:
            yield
        finally:
            with self._lock:
                self._claimed.discard(volume)
