"""Puts the requests of one mount on record while a command asks for them (`fusefs profile`).

While it is on, each of the session's handlers is replaced by one that notes the request and
how it ended. While it is off the handlers are the plain ones, and it costs nothing. The
command takes what is on record every moment; when it no longer does, recording ends with
the next request, for the record is bounded and lives in memory.

Reads of files that are open for passthrough never come here; their opens do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

from fusefs.fuse import protocol
from fusefs.fuse.protocol import Fopen, Opcode
from fusefs.fuse.read_handlers import Handler, Payload, Result
from fusefs.posix.operations import Operations
from fusefs.posix.types import Caller
from fusefs.telemetry.access_summary import Access

# Requests on record that were not taken yet: 6 MB of them. More are counted alone.
MOST = 20_000
# What is handed out at once, in characters as JSON has them; an answer has 4 MiB at most.
BATCH = 2 << 20
SILENCE_S = 5.0

_UNTRACED = (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT, Opcode.DESTROY)
_NAMED = (Opcode.LOOKUP, Opcode.UNLINK, Opcode.RMDIR)  # their bodies are names


class TraceError(Exception):
    """It can't be had; the message is for the user."""


class AccessTrace:
    """The record of one session, whose `handlers` it replaces. Belongs to the event loop."""

    def __init__(self, operations: Operations, handlers: dict[int, Handler]) -> None:
        self._operations = operations
        self._handlers = handlers
        self._plain: dict[int, Handler] = {}  # while it is on
        self._entries: deque[Access] = deque()
        self._lost = 0
        self._number = 0
        self._began = self._taken = 0.0

    @property
    def is_on(self) -> bool:
        return bool(self._plain)

    def start(self) -> int:
        """Begin to record; returns a number for `take`.

        Raises:
            TraceError: another command has it on.
        """
        now = time.monotonic()
        if self._plain:
            if now - self._taken < SILENCE_S:
                raise TraceError("another fusefs profile runs on this mount")
            self.stop()
        self._number += 1
        self._lost = 0
        self._began = self._taken = now
        self._plain = dict(self._handlers)
        for opcode, handler in self._plain.items():
            if opcode not in _UNTRACED:
                self._handlers[opcode] = self._traced(opcode, handler)
        return self._number

    def take(self, number: int) -> dict[str, Any]:
        """What was recorded since the last time, and how many requests more there were.

        Raises:
            TraceError: recording has ended, or is another command's by now.
        """
        if not self._plain or number != self._number:
            raise TraceError("the recording has ended: the daemon was replaced, or was not heard")
        self._taken = time.monotonic()
        entries, size = [], 0
        while self._entries and size < BATCH:
            entry = self._entries.popleft()
            size += 6 * len(entry.key) + 100  # at most so long as JSON
            entries.append(list(entry))
        lost, self._lost = self._lost, 0
        return {"entries": entries, "lost": lost, "has_more": bool(self._entries)}

    def end(self, number: int) -> None:
        """End the recording with this number, if it has not ended yet."""
        if number == self._number:
            self.stop()

    def stop(self) -> None:
        """End recording, and forget what was not taken."""
        self._handlers.update(self._plain)
        self._plain = {}
        self._entries.clear()

    def _traced(self, opcode: int, handler: Handler) -> Handler:
        def handle(nodeid: int, body: memoryview, caller: Caller) -> Result:
            began = time.monotonic()
            if began - self._taken > SILENCE_S:
                self.stop()
                return handler(nodeid, body, caller)
            entry = self._begin(opcode, nodeid, body, began)
            try:
                result = handler(nodeid, body, caller)
            except OSError as error:
                self._end(opcode, entry, began, error.errno or 0)
                raise
            if isinstance(result, Coroutine):
                return self._later(opcode, entry, began, result)
            self._end(opcode, entry, began, 0, result)
            return result

        return handle

    async def _later(
        self, opcode: int, entry: Access, began: float, result: Coroutine[Any, Any, Payload]
    ) -> Payload:
        if entry.source == "memory":
            entry = entry._replace(source="s3")
        try:
            payload = await result
        except OSError as error:
            self._end(opcode, entry, began, error.errno or 0)
            raise
        self._end(opcode, entry, began, 0, payload)
        return payload

    def _begin(self, opcode: int, nodeid: int, body: memoryview, began: float) -> Access:
        """What is known of a request before it is handled, and where its answer will come from."""
        entry = Access(
            at_s=began - self._began,
            operation=Opcode(opcode).name.lower(),
            key=self._key(nodeid),
            source="memory",
        )
        if opcode == Opcode.READ:
            fh, offset, size, *_ = protocol.READ_IN.unpack_from(body)
            source = self._source(fh, offset, size)
            return entry._replace(handle=fh, offset=offset, size=size, source=source)
        if opcode == Opcode.WRITE:
            fh, offset, size, *_ = protocol.WRITE_IN.unpack_from(body)
            return entry._replace(handle=fh, offset=offset, size=size, source="staged")
        if opcode == Opcode.RELEASE:
            return entry._replace(handle=protocol.RELEASE_IN.unpack_from(body)[0])
        if opcode == Opcode.OPEN:
            inode = self._operations.inodes.find(nodeid)
            size = inode.info.size if inode is not None and inode.info is not None else 0
            return entry._replace(size=size)
        if opcode in _NAMED:
            name = bytes(body[:-1]).decode(errors="surrogateescape")
            return entry._replace(key=entry.key + name)
        return entry

    def _key(self, nodeid: int) -> str:
        inode = self._operations.inodes.find(nodeid)
        return self._operations.inodes.key(inode) if inode is not None else f"node {nodeid}"

    def _source(self, fh: int, offset: int, size: int) -> str:
        """Where the bytes of a read are."""
        handle = self._operations.handles.files.get(fh)
        if handle is None:
            return "memory"
        if handle.inode.staged is not None:
            return "staged"
        file = handle.file
        is_here = file.is_complete or file.present.covers(offset, min(offset + size, file.size))
        return "cache" if is_here else "s3"

    def _end(
        self, opcode: int, entry: Access, began: float, number: int, payload: Payload = None
    ) -> None:
        entry = entry._replace(seconds=time.monotonic() - began, errno=number)
        if payload is not None and opcode == Opcode.READ:
            entry = entry._replace(size=len(payload))  # less at the end of a file
        elif payload is not None and opcode == Opcode.OPEN:
            fh, flags, _ = protocol.OPEN_OUT.unpack_from(payload)
            source = "passthrough" if flags & Fopen.PASSTHROUGH else "served"
            entry = entry._replace(handle=fh, source=source)
        if not self._plain:
            return
        if len(self._entries) >= MOST:
            self._lost += 1
        else:
            self._entries.append(entry)
