"""Runs the work of calls in threads, because a silent store or a large bucket may take too long.

Each call waits for its thread. Shortly before the call's deadline the answer is ABORTED with the
progress so far, so that the caller gets a reason. A repeated call waits for the same work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from csi.errors import AbortedError
from csi.server import MAX_CALLS, time_left

# Time between the answer and the call's deadline.
MARGIN_S = 2.0
# Time that a call without a deadline waits.
PATIENCE_S = 30.0

T = TypeVar("T")


class Progress:
    """The progress of a call, by `str`: what is `done` so far, and the request it waits for."""

    def __init__(self) -> None:
        self.done = ""
        self._request, self._since = "", time.monotonic()

    def wait_for(self, request: str) -> None:
        """Set the description of the request that the store has not answered yet; "" for none."""
        self._request, self._since = request, time.monotonic()

    def __str__(self) -> str:
        waited_s = time.monotonic() - self._since
        silent = f"no answer for {waited_s:.0f} s from {self._request}" if self._request else ""
        return ", ".join(filter(None, (self.done, silent))) or "it is not done yet"


class BackgroundWork:
    """Runs the work of calls in threads; equal calls at a time share one run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The driver does not wait for its threads when it ends (csi/main.py).
        self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="work")
        self._running: dict[bytes, tuple[Future[Any], Progress]] = {}

    def run(
        self,
        request: Message,
        context: grpc.ServicerContext,
        work: Callable[[Progress], T],
        limit_s: float = PATIENCE_S,
    ) -> T:
        """Start the work of a call, or join the work of an equal call, and return its result.

        Raises:
            AbortedError: the work continues; the call's deadline, or the end of `limit_s`, is near.
            Exception: the error that `work` raised.
        """
        future, progress = self._start_or_join(request, work)
        given_s = time_left(context)
        left_s = limit_s if given_s is None else min(given_s, limit_s)
        try:
            result: T = future.result(timeout=max(left_s - MARGIN_S, left_s / 2))
        except TimeoutError:
            if future.done():
                raise
            raise AbortedError(f"under way: {progress}") from None
        return result

    def _start_or_join(
        self, request: Message, work: Callable[[Progress], T]
    ) -> tuple[Future[T], Progress]:
        key = request.DESCRIPTOR.name.encode() + request.SerializeToString(deterministic=True)
        with self._lock:
            for ended in [each for each, (future, _) in self._running.items() if future.done()]:
                del self._running[ended]
            if key not in self._running:
                progress = Progress()
                self._running[key] = self._threads.submit(work, progress), progress
            return self._running[key]
