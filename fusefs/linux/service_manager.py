"""Messages to systemd that a service is ready and works: the protocol of sd_notify(3).

A service of `Type=notify` gets the socket's name in NOTIFY_SOCKET, and with `WatchdogSec=`
the longest time between two signs of life, in microseconds, in WATCHDOG_USEC. Without
these variables nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

_MICROSECOND_S = 1e-6
# A socket whose reader has stopped is full after a few messages (net.unix.max_dgram_qlen, 10 by
# default); a service must not hang for that.
SEND_LIMIT_S = 5.0


def notify(state: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send a state such as `READY=1` to systemd; errors are ignored."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    # A name that begins with @ is in the abstract namespace.
    name = address.replace("@", "\0", 1) if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(SEND_LIMIT_S)
        sender.connect(name)
        sender.sendall(state.encode())


def watchdog_interval_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds between signs of life, half of systemd's limit; None: no watchdog."""
    text = environment.get("WATCHDOG_USEC", "")
    is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    if not text.isdecimal() or int(text) == 0 or not is_ours:
        return None
    return int(text) * _MICROSECOND_S / 2


@contextlib.contextmanager
def ready(works: Callable[[], bool]) -> Iterator[None]:
    """Report the service as ready while the block runs; send signs of life if `works()` is true."""
    notify("READY=1")
    ending = threading.Event()
    interval_s = watchdog_interval_s()
    thread = threading.Thread(
        target=_send_signs, args=(works, interval_s, ending), name="watchdog", daemon=True
    )
    if interval_s is not None:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        notify("STOPPING=1")


def _send_signs(works: Callable[[], bool], interval_s: float, ending: threading.Event) -> None:
    while not ending.wait(interval_s):
        if works():
            notify("WATCHDOG=1")
