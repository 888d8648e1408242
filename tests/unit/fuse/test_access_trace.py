"""Requests on record, from the bytes that the kernel sends."""

from __future__ import annotations

from typing import Any, cast

from fusefs.fuse import protocol
from fusefs.fuse.access_trace import AccessTrace
from fusefs.fuse.protocol import Opcode
from fusefs.fuse.read_handlers import Handler
from fusefs.posix.types import Caller
from fusefs.telemetry.access_summary import Access, AccessSummary


class NoInodes:
    """A file system without any file, as far as a trace looks at it."""

    @property
    def inodes(self) -> NoInodes:
        return self

    def find(self, _nodeid: int) -> None:
        return None


def test_a_release_has_the_handle_that_ends() -> None:
    handlers: dict[int, Handler] = {Opcode.RELEASE: lambda _nodeid, _body, _caller: b""}
    trace = AccessTrace(cast(Any, NoInodes()), handlers)
    number = trace.start()
    body = memoryview(protocol.RELEASE_IN.pack(7, 0, 0, 0))
    handlers[Opcode.RELEASE](2, body, cast(Caller, None))
    [entry] = trace.take(number)["entries"]
    summary = AccessSummary()
    summary.add(Access(0.0, "read", "a", handle=7, size=10))
    summary.add(Access(*entry))
    assert not summary._ends
