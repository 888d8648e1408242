"""The control files: programs that use a mount write plans and paths to warm, and read the status.

The files are in the directory `.fusefs` of the mount's root. No listing shows this directory, and
it is never a key of the bucket. With the files a pod needs neither the command `fusefs` nor the
daemon's socket:

- `plan`: takes the order in which a reader will read, in the format of `fusefs plan`;
- `warm`: takes paths to fetch into the cache, like `fusefs warm`;
- `status`: has the mount's status as JSON, renewed for each read at offset 0.

Paths are relative to the mount. The files have the owner and the write or read permissions of the
mount's root; the kernel checks them (`default_permissions`). Writes form a stream: offsets are
ignored, and complete lines take effect at once. A refused line fails its `write`, and all later
writes to the same open file, with EINVAL; `status` and the log have the reason.

The inode table (posix/nodes/inode_table.py) never uses the files' node ids. No state is saved: a
new daemon continues to serve the files, except those that were being written (EIO).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any

import trio

from fusefs.fuse import protocol
from fusefs.fuse.protocol import ROOT_ID, Fopen, Opcode
from fusefs.fuse.read_handlers import CHANGING, Entries, Handler, Payload, ReadHandlers, Result
from fusefs.planning.table import planned
from fusefs.posix.nodes.inode import Attributes
from fusefs.posix.nodes.names import PRIVATE
from fusefs.posix.types import Caller, NameKind

logger = logging.getLogger("fusefs.session")

# Below FIRST_ID (posix/journal/records.py), and different from the offsets of "." and "..".
NODES = DIRECTORY, PLAN, WARM, STATUS = range(8, 12)
_NAMES = {b"plan": PLAN, b"warm": WARM, b"status": STATUS}
# The sections of the status that all users see who may read the file.
_SHOWN = ("version", "source", "read_only", "cache", "plans", "warming", "stalls")
# The number of lines that are processed before other tasks get their turn.
_TURN = 500
_LONGEST_LINE = 8192

# Gives the daemon a command, like its socket (daemon/status.py); OSError if it refuses.
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class ControlFiles:
    """The control files of one mount; `root` returns the attributes of its root directory."""

    def __init__(self, ask: Ask, root: Callable[[], Attributes]) -> None:
        self._ask = ask
        self._root = root
        # Numbers of file handles, which differ from those of the mount's earlier daemons.
        self._handles = count(time.time_ns())
        self._texts: dict[int, _Text] = {}
        self._statuses: dict[int, bytes] = {}
        self._refused: dict[str, Any] | None = None

    def tables(
        self, handlers: ReadHandlers, others: dict[int, Handler]
    ) -> tuple[dict[int, Handler], dict[int, Handler]]:
        """Return two tables of handlers by opcode: one for ordinary nodes, one for control files.

        `others` is the table without control files; the first result's LOOKUP finds `.fusefs` too.
        """
        look_up, name = others[Opcode.LOOKUP], f"{PRIVATE}\0".encode()

        def look_up_root(nodeid: int, body: memoryview, caller: Caller) -> Result:
            if nodeid == ROOT_ID and body == name:
                return self._entry(DIRECTORY)
            return look_up(nodeid, body, caller)

        def readdir(body: memoryview, *, is_plus: bool) -> Payload:
            _, offset, size, *_ = protocol.READ_IN.unpack_from(body)
            buffer = Entries(handlers, size, is_plus=is_plus)
            names = ((b".", DIRECTORY), (b"..", ROOT_ID), *_NAMES.items())
            for at, (entry, nodeid) in enumerate(names, 1):
                kind = NameKind.DIRECTORY if at < 3 else NameKind.FILE
                if at > offset and not buffer.add_name(entry, nodeid, at, kind):
                    break
            return buffer.data

        of_these: dict[int, Handler] = {
            **dict.fromkeys({*CHANGING} - {Opcode.COPY_FILE_RANGE}, _refuse),
            **dict.fromkeys((Opcode.FLUSH, Opcode.FSYNC, Opcode.RELEASEDIR), lambda *_: b""),
            Opcode.LOOKUP: lambda _node, body, _: self._entry(_NAMES.get(bytes(body[:-1]))),
            Opcode.FORGET: lambda *_: None,
            Opcode.GETATTR: lambda nodeid, *_: self._attr_out(nodeid),
            Opcode.SETATTR: lambda nodeid, *_: self._attr_out(nodeid),
            Opcode.OPENDIR: lambda *_: protocol.OPEN_OUT.pack(0, 0, 0),
            Opcode.READDIR: lambda _node, body, _: readdir(body, is_plus=False),
            Opcode.READDIRPLUS: lambda _node, body, _: readdir(body, is_plus=True),
            Opcode.GETXATTR: _no_attribute,
            Opcode.LISTXATTR: _no_attributes,
            Opcode.OPEN: self._open,
            Opcode.READ: self._read,
            Opcode.WRITE: self._write,
            Opcode.RELEASE: self._release,
        }
        return others | {Opcode.LOOKUP: look_up_root}, others | of_these

    # Attributes

    def _entry(self, nodeid: int | None) -> Payload:
        if nodeid is None:
            raise OSError(errno.ENOENT, "no such name")
        return protocol.ENTRY_OUT_HEAD.pack(nodeid, 0, 1, 1, 0, 0) + self._attr(nodeid)

    def _attr_out(self, nodeid: int) -> Payload:
        return protocol.ATTR_OUT_HEAD.pack(1, 0, 0) + self._attr(nodeid)

    def _attr(self, nodeid: int) -> bytes:
        root = self._root()
        seconds, rest = divmod(root.mtime_ns, 1_000_000_000)
        kind, allowed = stat.S_IFREG, 0o444 if nodeid == STATUS else 0o222
        if nodeid == DIRECTORY:
            kind, allowed = stat.S_IFDIR, 0o555
        times = (seconds,) * 3 + (rest,) * 3
        owner = (kind | root.mode & allowed, 1, root.uid, root.gid)
        return protocol.ATTR.pack(nodeid, 0, 0, *times, *owner, 0, 4096, 0)

    # Contents

    def _open(self, nodeid: int, _body: memoryview, _caller: Caller) -> Payload:
        fh = next(self._handles)
        if nodeid != STATUS:
            self._texts[fh] = _Text(self._ask, nodeid)
        return protocol.OPEN_OUT.pack(fh, Fopen.DIRECT_IO, 0)

    def _read(self, nodeid: int, body: memoryview, _caller: Caller) -> Result:
        fh, offset, size, *_ = protocol.READ_IN.unpack_from(body)
        return self._status(fh, offset, size) if nodeid == STATUS else b""

    async def _status(self, fh: int, offset: int, size: int) -> Payload:
        if not offset or fh not in self._statuses:
            found = await self._ask({"command": "status"})
            shown = {name: found[name] for name in _SHOWN} | {"refused": self._refused}
            self._statuses[fh] = json.dumps(shown, indent=1).encode() + b"\n"
        return self._statuses[fh][offset : offset + size]

    def _write(self, _nodeid: int, body: memoryview, _caller: Caller) -> Result:
        fh, _, size, *_ = protocol.WRITE_IN.unpack_from(body)
        start = protocol.WRITE_IN.size
        return self._take(fh, bytes(body[start : start + size]))

    async def _take(self, fh: int, data: bytes) -> Payload:
        text = self._texts.get(fh)
        if text is None:
            raise OSError(errno.EIO, "the daemon was replaced while a control file was written")
        await self._accept(text, text.add, data)
        return protocol.WRITE_OUT.pack(len(data), 0)

    def _release(self, _nodeid: int, body: memoryview, _caller: Caller) -> Result:
        fh, *_ = protocol.RELEASE_IN.unpack_from(body)
        self._statuses.pop(fh, None)
        text = self._texts.pop(fh, None)
        return b"" if text is None or text.why else self._end(text)

    async def _end(self, text: _Text) -> Payload:
        await self._accept(text, text.end)
        return b""

    async def _accept(
        self, text: _Text, work: Callable[..., Awaitable[None]], *data: bytes
    ) -> None:
        """Await `work(*data)`; after an OSError of it, all later calls for `text` get EINVAL."""
        async with text.lock:
            if text.why:
                raise OSError(errno.EINVAL, text.why)
            try:
                await work(*data)
            except OSError as error:
                text.why = str(error.strerror)
                name = "plan" if text.nodeid == PLAN else "warm"
                self._refused = {"file": name, "why": text.why, "at": time.time()}
                logger.warning("what was written to %s/%s is refused: %s", PRIVATE, name, text.why)
                if text.nodeid == WARM:  # its lines would stay on the cache disk
                    message = {"command": "warm list", "list": text.list_name, "lines": ""}
                    await self._ask(message | {"offset": -1})
                raise


class _Text:
    """A plan or list that a program writes; `why` it was refused, or ""; `lock` orders writes."""

    def __init__(self, ask: Ask, nodeid: int) -> None:
        self.nodeid = nodeid
        self.why = ""
        self.lock = trio.Lock()
        self._ask = ask
        self._separator = self._rest = b""
        self._lines = 0
        self._sent: dict[str, int] = {}  # bytes that were sent, by reader
        self.list_name = secrets.token_hex(16)

    async def add(self, data: bytes) -> None:
        """Add data that a program wrote, and process the complete lines.

        Raises:
            OSError: EINVAL, with the number of the line and the reason.
        """
        self._separator = self._separator or (b"\0" if b"\0" in data else b"\n")
        *lines, self._rest = (self._rest + data).split(self._separator)
        for at in range(0, len(lines), _TURN):
            await self._send(lines[at : at + _TURN])
            await trio.lowlevel.checkpoint()
        if len(self._rest) > _LONGEST_LINE:
            raise OSError(errno.EINVAL, f"line {self._lines + 1}: it is too long for a path")

    async def end(self) -> None:
        """Process an unfinished last line, then end the plan, or begin to warm the paths."""
        if self._rest:
            await self._send([self._rest])
        if self.nodeid == PLAN:
            for reader in self._sent:
                await self._give(reader, [], is_last=True)
        elif self._sent:
            await self._ask({"command": "warm", "path": f"{PRIVATE}/warm", "list": self.list_name})

    async def _send(self, lines: Sequence[bytes]) -> None:
        of: dict[str, list[str]] = {}
        for line in lines:
            self._lines += 1
            try:
                path, reader = self._parse(line)
            except ValueError as error:
                raise OSError(errno.EINVAL, f"line {self._lines}: {error}") from None
            if path:
                of.setdefault(reader, []).append(path)
        for reader, paths in of.items():
            await self._give(reader, paths)

    def _parse(self, line: bytes) -> tuple[str, str]:
        """Parse a line into (path or range, reader), ("", "") for a comment. Raises ValueError."""
        reader = span = ""
        if b"\0" in line or len(line) > _LONGEST_LINE:
            raise ValueError("it is no path")
        text = line.decode()
        if self._separator == b"\n":
            text, reader, span = [*text.split("\t", 2), "", ""][:3]
            text = text.strip()
            if not text or text.startswith("#"):
                return "", ""
        path = os.path.normpath(text)
        if path.startswith(("/", "../")) or path in (".", ".."):
            raise ValueError("its path is not relative to the mount")
        if self.nodeid == WARM and (reader or span or "\n" in path):
            raise ValueError("it is no path to be warmed")
        return planned(path, span.strip()), reader.strip()

    async def _give(self, reader: str, paths: Sequence[str], *, is_last: bool = False) -> None:
        offset = self._sent.get(reader, 0)
        self._sent[reader] = offset + sum(len(path.encode()) + 1 for path in paths)
        if self.nodeid == PLAN:
            message = {"command": "plan", "reader": reader, "entries": paths, "is_last": is_last}
        else:
            lines = "".join(f"{path}\n" for path in paths)
            message = {"command": "warm list", "list": self.list_name, "lines": lines}
        await self._ask(message | {"offset": offset})


def _refuse(_nodeid: int, _body: memoryview, _caller: Caller) -> Payload:
    raise OSError(errno.EPERM, "control files are read and written, and nothing else")


def _no_attribute(_nodeid: int, _body: memoryview, _caller: Caller) -> Payload:
    raise OSError(errno.ENODATA, "control files have no extended attributes")


def _no_attributes(_nodeid: int, body: memoryview, _caller: Caller) -> Payload:
    is_question = not protocol.GETXATTR_IN.unpack_from(body)[0]
    return protocol.GETXATTR_OUT.pack(0, 0) if is_question else b""
