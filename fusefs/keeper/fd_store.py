"""The descriptor store: holds mounts for others, in the CSI driver's container.

A FUSE mount lives for as long as any process holds its /dev/fuse descriptor. A
keeper whose configuration names a `descriptor_store` leaves a copy there, so that
the mount outlives keeper, broker and daemon all at once, as when the container
that they run in is replaced. A process that mounts there again fetches the copy.

What is held goes with the process, and when it is dropped or the mount is gone.

When each process gets the descriptor: the keeper opens it, and its broker is
forked with it; once it is mounted, the daemon and this store get it, each within
moments. The next daemon gets it from a broker, after this store has been given
it once more; the next keeper gets it from here. So each of the three may die,
and be replaced, while the other two have it.

Requests and answers are those of exchange.py:

    {"do": "hold", "name": …} + the descriptor   keep it, instead of one of that name
    {"do": "fetch", "name": …}                   answered with a copy
    {"do": "drop", "name": …}
    {"do": "list"}                               answered with the names

Only root, or the user that runs the process, is answered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial

from fusefs.keeper import exchange
from fusefs.keeper.control import Client, ControlSocket, Listener, Loop
from fusefs.keeper.exchange import ControlError
from fusefs.linux.fuse_connection import is_device

TYPE_CHECKING = False  # the keeper imports this module, and does without typing
if TYPE_CHECKING:
    from typing import Any

CLIENT_S = 5.0
LOOK_S = 1.0


def name_of(mountpoint: str, connection: int) -> str:
    """The name under which a mount's descriptor is held."""
    return f"{mountpoint}#{connection}"


# --- for its clients --------------------------------------------------------------


def hold(path: str, name: str, fd: int) -> None:
    """Have the service at `path` hold a copy of the descriptor.

    Raises:
        ControlError: it does not.
    """
    exchange.exchange_fds(path, {"do": "hold", "name": name}, CLIENT_S, [fd])


def fetch(path: str, name: str) -> int:
    """A copy of what is held under the name; non-inheritable.

    Raises:
        ControlError: nothing is, or the service does not answer.
    """
    _, fds = exchange.exchange_fds(path, {"do": "fetch", "name": name}, CLIENT_S)
    if not fds:
        raise ControlError("no descriptor came")
    return fds[0]


def drop(path: str, name: str) -> None:
    """Have it held no longer.

    Raises:
        ControlError: nothing is, or the service does not answer.
    """
    exchange.exchange(path, {"do": "drop", "name": name}, CLIENT_S)


# --- the store ----------------------------------------------------------------------


class FdStore:
    """Holds descriptors, and answers on the socket `path`; `loop` is its process's.

    It begins with those that are `held`, by their names, and closes them.

    Raises:
        OSError: it can't listen.
    """

    def __init__(self, path: str, held: Mapping[str, int]) -> None:
        self._path = path
        self._held: dict[str, int] = {}
        self.loop = Loop()
        for name, fd in held.items():
            self._hold(name, fd)
        self.listen()

    def listen(self) -> None:
        """Begin to answer, in the place of whoever did. Raises as the constructor."""
        self._listener = Listener(self._path)
        self._control = ControlSocket(self.loop, self._listener, self._answer)

    def close(self) -> None:
        """Answer no longer. What is held stays."""
        self._control.close()
        self.loop.forget(self._listener.socket.fileno())
        self._listener.remove()
        self._listener.socket.close()

    def dismiss_late(self) -> None:
        """Send away the clients that have had their time; to be called now and then."""
        self._control.dismiss_late(time.monotonic())

    def _answer(self, client: Client, request: dict[str, Any]) -> None:
        name = str(request.get("name", ""))
        match request.get("do"):
            case "hold" if name:
                if not client.fds or not is_device(os.fstat(client.fds[0])):
                    raise ControlError("only a descriptor of /dev/fuse is held")
                self._hold(name, client.fds.pop(0))
                client.answer({"ok": True})
            case "fetch" | "drop" if name not in self._held:
                raise ControlError(f"nothing is held as {name}")
            case "fetch":
                client.answer({"ok": True}, self._held[name])
            case "drop":
                self._drop(name)
                client.answer({"ok": True})
            case "list":
                client.answer({"ok": True, "names": sorted(self._held)})
            case _:
                raise ControlError("no such request")

    def _hold(self, name: str, fd: int) -> None:
        if name in self._held:
            self._drop(name)
        self._held[name] = fd
        # For no event: the kernel reports POLLERR, which is the mount's end, in any case.
        self.loop.watch(fd, 0, partial(self._drop, name))

    def _drop(self, name: str) -> None:
        fd = self._held.pop(name)
        self.loop.forget(fd)
        os.close(fd)
