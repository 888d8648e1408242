"""Ends requests of processes that are being killed.

Any signal interrupts a request, also a profiler's timer; but no call on a local disk ever fails
with EINTR, and programs do not expect it to. So a request is ended, with EINTR, if its process is
being killed. The kernel says only once that a request was interrupted, so one that was, and goes
on, is looked at again.

Where the process cannot be seen (it has no number in the mount's PID namespace, or the mount is
served in another one and the keeper does not know either), a request that takes longer than
`GRACE_S` after the interruption is ended; a close and an fsync have `SAVING_GRACE_S`, so programs
rarely miss that their data was kept.
"""

from __future__ import annotations

from typing import Protocol

import trio

from fusefs.fuse.protocol import Opcode
from fusefs.linux import callers
from fusefs.linux.callers import EXITS, HOLDS, HOLDS_NOT, IS_KILLED, UNKNOWN, WAS_KILLED

GRACE_S = 1.0
SAVING_GRACE_S = 30.0
# Between two looks at a process whose request was interrupted.
LOOK_S = 0.25

_SAVING = (Opcode.FLUSH, Opcode.FSYNC)


class Interruptible(Protocol):
    """A request that waits; `scope` ends it."""

    opcode: int
    pid: int
    scope: trio.CancelScope


class ProcessInspector(Protocol):
    """Looks at processes of the mount's PID namespace: the keeper."""

    @property
    def namespace(self) -> int:
        """The PID namespace of requests' processes, which is its own; 0 if it does not look."""

    async def look_at_process(self, pid: int, ino: int = 0) -> int:
        """The answer of `callers.fate` there, or with a file's number of `callers.holding`."""


class Callers:
    """Looks at processes, in this namespace or by the keeper, if there is one that could."""

    def __init__(self, keeper: ProcessInspector | None = None) -> None:
        self._namespace = callers.namespace()
        self.keeper = keeper

    @property
    def _sees(self) -> bool:
        """False if the numbers of requests' processes are other processes' here."""
        keeper = self.keeper
        is_elsewhere = keeper is not None and keeper.namespace not in (0, self._namespace)
        return bool(self._namespace) and not is_elsewhere

    def fate(self, pid: int) -> int:
        """The fate of a process, as far as this process can see it."""
        return callers.fate(pid) if self._sees else UNKNOWN

    async def find_fate(self, pid: int) -> int:
        """The fate of a process as this process or the keeper can see it."""
        seen = self.fate(pid)
        keeper = self.keeper
        if not pid or keeper is None or not keeper.namespace or seen not in (UNKNOWN, EXITS):
            return seen
        reported = await keeper.look_at_process(pid)
        return reported if reported != UNKNOWN else seen

    async def will_close(self, pid: int, ino: int) -> bool | None:
        """True if a process or a child of it will close a file for writing; None if unknown."""
        seen = callers.holding(pid, ino) if self._sees else UNKNOWN
        if seen == UNKNOWN and pid and self.keeper is not None and self.keeper.namespace:
            seen = await self.keeper.look_at_process(pid, ino)
        return {HOLDS: True, HOLDS_NOT: False}.get(seen)

    async def was_killed(self, pid: int) -> bool:
        """True if a process closes its files because a signal ends it."""
        return await self.find_fate(pid) == WAS_KILLED


class Interrupts:
    """The interrupted requests of one session. Belongs to the event loop."""

    def __init__(self, seen_by: Callers) -> None:
        self._callers = seen_by
        # By their unique numbers: since when, in seconds of trio's clock.
        self._interrupted: dict[int, tuple[Interruptible, float]] = {}
        self._has_some = trio.Event()

    def note(self, unique: int, request: Interruptible) -> None:
        """The kernel says that a request was interrupted."""
        if self._callers.fate(request.pid) in (IS_KILLED, WAS_KILLED):
            request.scope.cancel()
            return
        self._interrupted.setdefault(unique, (request, trio.current_time()))
        self._has_some.set()

    def forget(self, unique: int) -> None:
        """A request has been answered."""
        self._interrupted.pop(unique, None)

    async def run(self) -> None:
        """Look at interrupted requests until cancelled."""
        while True:
            await self._has_some.wait()
            # Side by side, for a keeper that is stuck lets each look take seconds.
            async with trio.open_nursery() as nursery:
                for unique, (request, since) in self._interrupted.items():
                    nursery.start_soon(self._look, unique, request, since)
            if not self._interrupted:
                self._has_some = trio.Event()
            else:
                await trio.sleep(LOOK_S)

    async def _look(self, unique: int, request: Interruptible, since: float) -> None:
        if await self._is_to_end(request, since):
            request.scope.cancel()
            self.forget(unique)

    async def _is_to_end(self, request: Interruptible, since: float) -> bool:
        found = await self._callers.find_fate(request.pid)
        if found != UNKNOWN:
            return found in (IS_KILLED, WAS_KILLED)
        grace_s = SAVING_GRACE_S if request.opcode in _SAVING else GRACE_S
        return trio.current_time() - since >= grace_s
