"""What a daemon does on signals; see the text of main.py."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable

import trio

logger = logging.getLogger("fusefs.daemon")


async def watch(unmount: Callable[[], Awaitable[None]], log_waiting: Callable[[], None]) -> None:
    """Unmount when told to, end when told again, and say what waits, until cancelled."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGUSR2) as received:
        ending = False
        async for number in received:
            if number == signal.SIGUSR2:
                log_waiting()
            elif ending:
                logger.warning("ending with the mount still in use")
                os._exit(1)
            else:
                ending = True
                await unmount()
