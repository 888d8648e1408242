"""The end of requests whose processes are being killed.

Any signal interrupts a request, even a profiler's timer. But calls on a local disk never fail with
EINTR, and programs do not expect it. So a request is ended, with EINTR, only if its process is
being killed. The kernel sends only one INTERRUPT per request, so if an interrupted request
continues, its process is inspected again and again.

If the process cannot be inspected (it has no pid in the mount's PID namespace, or the daemon is
in another namespace and the keeper cannot inspect it either), the request is ended `GRACE_S` after
its interruption; a close or an fsync `SAVING_GRACE_S` after it, so that programs rarely get an
error for data that is being saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import trio

from fusefs.fuse.protocol import Opcode
from fusefs.linux import callers
from fusefs.linux.callers import EXITS, HOLDS, HOLDS_NOT, IS_KILLED, UNKNOWN, WAS_KILLED
from fusefs.posix.operations import Operations

# The names of the opcodes, for logs and metrics.
OPERATIONS = {int(opcode): opcode.name.lower() for opcode in Opcode}

GRACE_S = 1.0
SAVING_GRACE_S = 30.0
# The interval between inspections of a process whose request was interrupted.
LOOK_S = 0.25

_SAVING = (Opcode.FLUSH, Opcode.FSYNC)


@dataclass(slots=True)
class WaitingRequest:
    """A request that a task answers since `since` (monotonic s); cancelling `scope` ends it."""

    opcode: int
    nodeid: int
    pid: int
    since: float
    scope: trio.CancelScope

    def describe(self, now: float, operations: Operations) -> str:
        """Describe the request in one line for the log; `now` is in monotonic seconds."""
        inode = operations.inodes.find(self.nodeid)
        key = operations.inodes.key(inode) if inode is not None else f"node {self.nodeid}"
        name = OPERATIONS.get(self.opcode, str(self.opcode))
        who = f" by process {self.pid}" if self.pid else ""
        return f"{name.upper()} of {key!r}{who} waits for {now - self.since:.1f} s"


class ProcessInspector(Protocol):
    """A connection to the keeper, which sees the processes that send requests, and what they do."""

    @property
    def namespace(self) -> int:
        """The PID namespace of the keeper and of requests' pids; 0 if the keeper can't inspect."""

    async def look_at_process(self, pid: int, ino: int = 0) -> int:
        """Ask the keeper about process `pid`: return one of `FATES` (linux/callers.py).

        With `ino`, a file's st_ino, return instead HOLDS if the process or a child has the file
        open for writing, HOLDS_NOT or UNKNOWN.
        """


class Callers:
    """Inspects the processes that make requests, in this namespace or through the keeper."""

    def __init__(self, keeper: ProcessInspector | None = None) -> None:
        self._namespace = callers.namespace()
        self.keeper = keeper

    @property
    def _sees(self) -> bool:
        """True if this process can look up requests' pids: they are of its own PID namespace."""
        keeper = self.keeper
        is_elsewhere = keeper is not None and keeper.namespace not in (0, self._namespace)
        return bool(self._namespace) and not is_elsewhere

    def fate(self, pid: int) -> int:
        """Return one of `FATES`: alive or ending; UNKNOWN if the daemon can't see the process."""
        return callers.fate(pid) if self._sees else UNKNOWN

    async def find_fate(self, pid: int) -> int:
        """Return one of `FATES`; ask the keeper, which sees more, if it looks UNKNOWN or EXITS."""
        seen = self.fate(pid)
        keeper = self.keeper
        if not pid or keeper is None or not keeper.namespace or seen not in (UNKNOWN, EXITS):
            return seen
        reported = await keeper.look_at_process(pid)
        return reported if reported != UNKNOWN else seen

    async def will_close(self, pid: int, ino: int) -> bool | None:
        """True if `pid` or its child has `ino` open for writing: a close follows; None: unknown."""
        seen = callers.holding(pid, ino) if self._sees else UNKNOWN
        if seen == UNKNOWN and pid and self.keeper is not None and self.keeper.namespace:
            seen = await self.keeper.look_at_process(pid, ino)
        return {HOLDS: True, HOLDS_NOT: False}.get(seen)


class Interrupts:
    """The interrupted requests of one session. Belongs to the event loop."""

    def __init__(self, seen_by: Callers) -> None:
        self._callers = seen_by
        # Interrupted requests and the times of the interrupts (trio's clock), by unique number.
        self._interrupted: dict[int, tuple[WaitingRequest, float]] = {}
        self._has_some = trio.Event()

    def note(self, unique: int, request: WaitingRequest) -> None:
        """End an interrupted request if its process is being killed, else watch it."""
        if self._callers.fate(request.pid) in (IS_KILLED, WAS_KILLED):
            request.scope.cancel()
            return
        self._interrupted.setdefault(unique, (request, trio.current_time()))
        self._has_some.set()

    def forget(self, unique: int) -> None:
        """Stop watching a request that has been answered."""
        self._interrupted.pop(unique, None)

    async def run(self) -> None:
        """Watch interrupted requests and end those of killed processes, until cancelled."""
        while True:
            await self._has_some.wait()
            # In parallel, because each inspection takes seconds if the keeper is stuck.
            async with trio.open_nursery() as nursery:
                for unique, (request, since) in self._interrupted.items():
                    nursery.start_soon(self._look, unique, request, since)
            if not self._interrupted:
                self._has_some = trio.Event()
            else:
                await trio.sleep(LOOK_S)

    async def _look(self, unique: int, request: WaitingRequest, since: float) -> None:
        found = await self._callers.find_fate(request.pid)
        if found == UNKNOWN:
            grace_s = SAVING_GRACE_S if request.opcode in _SAVING else GRACE_S
            is_to_end = trio.current_time() - since >= grace_s
        else:
            is_to_end = found in (IS_KILLED, WAS_KILLED)
        if is_to_end:
            request.scope.cancel()
            self.forget(unique)
