"""The FUSE protocol on /dev/fuse, served by trio.

One task waits until the descriptor is readable, then reads requests until there are none, at most a
fixed number between two waits. The task answers a request at once if it can. If the operation
returns a coroutine, because it must wait, the coroutine becomes a task in the session's nursery; an
INTERRUPT cancels this task if the program is being killed. For 4 KiB reads by eight readers the
rate is 88,000 requests a second, 41,000 with a task for each request, 19,000 under pyfuse3.

The request and reply buffers are private memory, resident and locked. Otherwise a program would get
EIO if the daemon was killed while the kernel, copying a reply, faults in a page of the reply.

A session can continue the session of another process (`adopt`). The kernel resends the requests
that the other process had read but not answered, with a mark in the request's unique number that
the reply must repeat. Before Linux 6.9 such requests are lost, so on older kernels the caller of
`adopt` must know that none is left.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections.abc import Coroutine
from contextlib import nullcontext
from typing import Any

import trio

from fusefs.fuse import protocol
from fusefs.fuse._replies import ReplyThread
from fusefs.fuse.control_files import NODES as CONTROL_NODES
from fusefs.fuse.control_files import ControlFiles
from fusefs.fuse.fast_path import FastPathReader
from fusefs.fuse.interrupts import OPERATIONS, Callers, Interrupts, WaitingRequest
from fusefs.fuse.notifier import note_lost_reply
from fusefs.fuse.protocol import Init, Opcode
from fusefs.fuse.read_handlers import REFUSED, Buffer, Handler, Payload, ReadHandlers
from fusefs.fuse.write_handlers import WriteHandlers
from fusefs.linux.libc import lock_memory
from fusefs.posix.journal.journal import Journal
from fusefs.posix.operations import Operations
from fusefs.posix.read.read import MAX_READ
from fusefs.posix.types import Caller, InFile
from fusefs.store.errors import StoreError
from fusefs.telemetry.activity import ACTIVITY
from fusefs.telemetry.requests import RequestTimes
from fusefs.telemetry.stalls import served

logger = logging.getLogger("fusefs.session")

# The buffer holds a WRITE of 1 MiB with its headers; all other requests are smaller.
MAX_WRITE = 1 << 20
BUFFER_SIZE = MAX_WRITE + 4096
# The reply to a READ of 64 KiB with its header, the longest that compiled code answers.
REPLY_SIZE = (64 << 10) + 4096
MAX_PAGES = 256
# The kernel sends at most this many page cache reads at a time. Further reads wait in the kernel,
# even reads of files on the local disk, so the limit exceeds the number of reads that may wait for
# S3. With more than CONGESTED reads the kernel does not read ahead.
MAX_BACKGROUND = 1024
CONGESTED = 48
# The number of requests between two checkpoints (about 2 ms).
BATCH = 64

_WANTED = (
    Init.ASYNC_READ
    | Init.ATOMIC_O_TRUNC
    | Init.BIG_WRITES
    | Init.DO_READDIRPLUS
    | Init.ASYNC_DIO
    | Init.PARALLEL_DIROPS
    | Init.MAX_PAGES
    | Init.CACHE_SYMLINKS
    | Init.HANDLE_KILLPRIV_V2
    | Init.HAS_RESEND
    | Init.ALLOW_IDMAP
)
# Flags that the guarantees of the file system depend on.
_NEEDED = Init.PARALLEL_DIROPS | Init.MAX_PAGES | Init.DO_READDIRPLUS

_UNMARKED = protocol.UNIQUE_RESEND - 1
_UNPACK_HEADER, _IN_HEADER_SIZE = protocol.IN_HEADER.unpack_from, protocol.IN_HEADER.size
_PACK_HEADER, _OUT_HEADER_SIZE = protocol.OUT_HEADER.pack, protocol.OUT_HEADER.size
# Up to this size in bytes, copying header and reply into one buffer is faster than writev.
_COPIED = 512


class UnsupportedKernelError(Exception):
    """The kernel lacks a function that the session needs; the message is for the user."""


def _locked_memory(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    try:
        lock_memory(memory)
    except OSError as error:
        logger.debug("can't lock memory: %s", error.strerror)
    return memory


class Session:
    """The kernel session of one mount: reads and answers the requests on its /dev/fuse descriptor.

    `max_stack_depth` is 0 for no passthrough, 1 to negotiate passthrough, 2 if the
    cache's own file system is stacked (overlayfs). Without `has_fast_path` Python
    answers all requests.
    """

    name = "kernel"
    # For the tasks of requests that wait; and for the READs that the `ReplyThread` gives back.
    _nursery: trio.Nursery
    _token: trio.lowlevel.TrioToken

    def __init__(
        self,
        fd: int,
        operations: Operations,
        log: Journal,
        *,
        max_stack_depth: int = 1,
        has_fast_path: bool = True,
        callers: Callers | None = None,
        control: ControlFiles | None = None,
    ) -> None:
        self._fd = fd
        self._operations = operations
        self._log = log
        self._max_stack_depth = max_stack_depth
        memory = _locked_memory(BUFFER_SIZE)
        self._buffer = memoryview(memory)
        self._buffers = [self._buffer]
        # By unique number, without the mark of a resent request.
        self._waiting: dict[int, WaitingRequest] = {}
        self._interrupts = Interrupts(callers or Callers())
        self._reading = trio.CancelScope()
        self.negotiated = Init(0)
        self._requests = 0
        self.times = RequestTimes(OPERATIONS)
        handlers = ReadHandlers(operations)
        self._handlers: dict[int, Handler] = handlers.table | {
            Opcode.DESTROY: lambda _nodeid, _body, _caller: b"",
            Opcode.INTERRUPT: self._interrupt,
        }
        if operations.mutations is not None:
            self._handlers |= WriteHandlers(handlers, operations.mutations).table
        self._control_handlers = self._handlers
        if control is not None:
            self._handlers, self._control_handlers = control.tables(handlers, self._handlers)
        self._replies = ReplyThread(fd, MAX_READ, self._give_back)
        self._warm: FastPathReader | None = None
        if has_fast_path:
            reply = _locked_memory(REPLY_SIZE)
            self._warm = FastPathReader(fd, memory, reply, operations, self.times, log)

    @property
    def requests(self) -> int:
        """The number of requests that were read from the kernel."""
        return self._requests + (self.compiled_requests or 0)

    @property
    def compiled_requests(self) -> int | None:
        """The number of requests that compiled code has answered; None without the fast path."""
        return self._warm.compiled.requests if self._warm is not None else None

    @property
    def polled_s(self) -> float:
        """The time that compiled code has spent on polling for requests, in seconds."""
        return self._warm.compiled.polled_ns / 1e9 if self._warm is not None else 0.0

    @property
    def waiting(self) -> list[WaitingRequest]:
        return list(self._waiting.values())

    @property
    def has_passthrough(self) -> bool:
        return Init.PASSTHROUGH in self.negotiated

    @property
    def has_resend(self) -> bool:
        """True if the kernel can send requests again to another process (Linux 6.9 and later)."""
        return Init.HAS_RESEND in self.negotiated

    @property
    def survival(self) -> tuple[bool, str]:
        """A pair: True if the mount outlives this process, and the reason for the answer."""
        if self.has_resend:
            return True, "a keeper holds the mount"
        return False, (
            "this kernel cannot send requests again (Linux 6.9 or later can):"
            " the mount outlives an upgrade, and not the death of its daemon"
        )

    async def negotiate(self) -> None:
        """Answer the first request, INIT; UnsupportedKernelError if the kernel is too old."""
        await trio.lowlevel.wait_readable(self._fd)
        size = os.readv(self._fd, [self._buffer])
        _, opcode, unique, *_ = protocol.IN_HEADER.unpack_from(self._buffer)
        if opcode != Opcode.INIT:
            raise UnsupportedKernelError(f"the kernel began with request {opcode} instead of INIT")
        self._reply(unique, self._init(self._buffer[protocol.IN_HEADER.size : size]))

    def adopt(self, init_out: bytes, *, is_all_answered: bool) -> None:
        """Continue an earlier process's session; make the kernel resend unanswered requests.

        `init_out` is the earlier process's reply to INIT. The caller must have restored the
        tables, because the kernel's next request may be about any node or handle.
        `is_all_answered` is True if the earlier process has answered all requests.

        Raises:
            UnsupportedKernelError: requests may be unanswered, and the kernel can't resend them.
        """
        answer = protocol.INIT_OUT.unpack_from(init_out)
        self.negotiated = Init(answer[3] | answer[10] << 32)
        if not self._resend() and not is_all_answered:
            raise UnsupportedKernelError(
                "this kernel cannot send requests again (Linux 6.9 or later can),"
                " and the last daemon may have left some unanswered"
            )

    def _resend(self) -> bool:
        """Make the kernel resend requests that were read but not answered; False if it can't."""
        if not self.has_resend:
            return False
        header = protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size, protocol.NOTIFY_RESEND_CODE, 0)
        try:
            os.write(self._fd, header)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the kernel does not know the notification
                raise
            self.negotiated &= ~Init.HAS_RESEND
            return False
        return True

    async def run(self) -> bool:
        """Answer requests until the file system is unmounted or `stop_reading` is called.

        Returns True if the file system was unmounted. Cancellation takes effect between two
        requests and leaves the mount as it is.
        """
        is_unmounted = False
        async with trio.open_nursery() as watching:
            watching.start_soon(self._interrupts.run)
            async with trio.open_nursery() as nursery:
                self._nursery, self._token = nursery, trio.lowlevel.current_trio_token()
                try:
                    with self._reading:
                        await self._serve()
                        is_unmounted = True
                        # The mount is gone, so no program waits for an answer any more.
                        nursery.cancel_scope.cancel()
                finally:
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(self._replies.close)
            watching.cancel_scope.cancel()
        return is_unmounted

    def stop_reading(self) -> None:
        """Stop reading requests; `run` returns when all requests read so far are answered."""
        self._reading.cancel()

    async def _serve(self) -> None:
        with self._warm.updated_first() if self._warm is not None else nullcontext():
            while True:
                await trio.lowlevel.wait_readable(self._fd)
                while True:
                    ACTIVITY.note()
                    count = self._answer_batch()
                    if count < 0:
                        return
                    if count < BATCH:
                        break
                    await trio.lowlevel.checkpoint()

    def _answer_batch(self) -> int:
        """Read and answer up to `BATCH` requests; return their number, or -1 if unmounted."""
        warm = self._warm if self._warm is not None and self._warm.begin() else None
        for count in range(BATCH):
            try:
                # There is no polling while requests wait, because their tasks need their turn.
                size = warm.receive(may_poll=not self._waiting) if warm else self._receive()
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return -1
                raise
            if size is None:
                return count
            if warm is not None:
                warm.update()
            if not size:
                break
            self._answer(size)
        return BATCH

    def _receive(self) -> int | None:
        """Read a request into the buffer; return its size, or None if there is none."""
        while True:
            try:
                return os.readv(self._fd, self._buffers)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EINTR):
                    raise  # otherwise the request was interrupted before it could be read

    def _answer(self, size: int) -> None:
        _, opcode, unique, nodeid, uid, gid, pid, extension, _ = _UNPACK_HEADER(self._buffer)
        self._requests += 1
        times = self.times
        began = 0.0 if self._requests % times.period else time.monotonic()
        handlers = self._control_handlers if nodeid in CONTROL_NODES else self._handlers
        handler = handlers.get(opcode)
        if handler is None:
            number = REFUSED.get(opcode, errno.ENOSYS)
            self._reply_errno(unique, number)
            times.failed(opcode, began, number, times.period)
            return
        body = self._buffer[_IN_HEADER_SIZE : size - 8 * extension]
        try:
            result = handler(nodeid, body, Caller(unique & _UNMARKED, uid, gid, pid))
        except (OSError, StoreError) as error:
            self._reply_error(unique, error)
            times.failed(opcode, began, error.errno, times.period)
            return
        except Exception:
            if not unique & protocol.UNIQUE_RESEND:
                raise
            self._reply_fault(unique)
            return
        if isinstance(result, InFile) and not self._sends(unique, result):
            result = self._operations.read_again(result.fh, result.offset, result.size)
        if isinstance(result, (bytes, bytearray, memoryview, InFile)):
            if not isinstance(result, InFile):
                self._reply(unique, result)
            times.counts[opcode] += 1
            if began:
                times.sampled(opcode, began)
        elif result is not None:
            since = began or time.monotonic()
            waiting = WaitingRequest(opcode, nodeid, pid, since, trio.CancelScope())
            self._waiting[unique & _UNMARKED] = waiting
            self._nursery.start_soon(self._answer_later, unique, waiting, result)

    def _sends(self, unique: int, at: InFile) -> bool:
        """Let the `ReplyThread` answer a READ from a file; False if the thread can't take it."""
        fd = at.file.fd
        return fd >= 0 and self._replies.send(unique, at.fh, fd, at.offset, at.size, at.flags)

    def _give_back(self, unique: int, fh: int, offset: int, size: int) -> None:
        """Have the event loop answer a READ that the `ReplyThread` cannot. Runs in that thread."""
        self._token.run_sync_soon(self._read_again, unique, fh, offset, size)

    def _read_again(self, unique: int, fh: int, offset: int, size: int) -> None:
        self.times.counts[Opcode.READ] -= 1  # it was counted as answered
        handle = self._operations.handles.files.get(fh)
        nodeid = handle.inode.nodeid if handle is not None else 0
        waiting = WaitingRequest(Opcode.READ, nodeid, 0, time.monotonic(), trio.CancelScope())
        self._waiting[unique & _UNMARKED] = waiting
        again = self._operations.read_again(fh, offset, size)
        self._nursery.start_soon(self._answer_later, unique, waiting, again)

    async def _answer_later(
        self, unique: int, waiting: WaitingRequest, result: Coroutine[Any, Any, Payload]
    ) -> None:
        """Await a result and send the reply; EINTR if the process is being killed."""
        try:
            with waiting.scope, served():
                payload = await result
                if isinstance(payload, InFile) and not self._sends(unique, payload):
                    payload = await self._operations.read_again(
                        payload.fh, payload.offset, payload.size
                    )
                if payload is not None:
                    if not isinstance(payload, InFile):
                        self._reply(unique, payload)
                    self.times.answered(waiting.opcode, waiting.since)
            if waiting.scope.cancelled_caught:
                self._reply_error(unique, OSError(errno.EINTR, "interrupted"))
                self.times.failed(waiting.opcode, waiting.since, errno.EINTR)
        except (OSError, StoreError) as error:
            self._reply_error(unique, error)
            self.times.failed(waiting.opcode, waiting.since, error.errno)
        except Exception:
            if not unique & protocol.UNIQUE_RESEND:
                raise
            self._reply_fault(unique)
        finally:
            del self._waiting[unique & _UNMARKED]
            self._interrupts.forget(unique & _UNMARKED)

    def _reply(self, unique: int, payload: Buffer) -> None:
        size = _OUT_HEADER_SIZE + len(payload)
        header = _PACK_HEADER(size, 0, unique)
        try:
            if size <= _COPIED:
                os.write(self._fd, header + payload)
            else:
                os.writev(self._fd, (header, payload))
        except OSError as error:
            note_lost_reply(error)

    def _reply_error(self, unique: int, error: OSError | StoreError) -> None:
        number = error.errno or errno.EIO
        if number == errno.EIO:
            logger.info("answering EIO: %s", error)
        self._reply_errno(unique, number)

    def _reply_errno(self, unique: int, number: int) -> None:
        try:
            os.write(self._fd, _PACK_HEADER(_OUT_HEADER_SIZE, -number, unique))
        except OSError as lost:
            note_lost_reply(lost)

    def _reply_fault(self, unique: int) -> None:
        """Answer EIO to a resent request whose handler raised an unexpected exception.

        Such a request may have ended the previous process, and would end each new process.
        """
        logger.exception("a request that was sent again meets a fault")
        self._reply_error(unique, OSError(errno.EIO, "a fault of fusefs"))

    # The session itself

    def _init(self, body: memoryview) -> bytes:
        major, minor, max_readahead, flags = protocol.INIT_IN_SHORT.unpack_from(body)
        if flags & Init.INIT_EXT and len(body) >= protocol.INIT_IN.size:
            flags |= protocol.INIT_IN.unpack_from(body)[4] << 32
        if major != protocol.MAJOR or minor < protocol.OLDEST_MINOR or flags & _NEEDED != _NEEDED:
            raise UnsupportedKernelError(
                f"this kernel speaks FUSE {major}.{minor}, too old for the kernel session"
                " (Linux 4.20 or later): use --session pyfuse3"
            )
        wanted = _WANTED | (Init.INIT_EXT if flags & Init.INIT_EXT else 0)
        if self._max_stack_depth:
            wanted |= Init.PASSTHROUGH
        self.negotiated = Init(flags & wanted)
        answer = protocol.INIT_OUT.pack(
            protocol.MAJOR,
            protocol.MINOR,
            max_readahead,
            self.negotiated & 0xFFFFFFFF,
            MAX_BACKGROUND,
            CONGESTED,
            MAX_WRITE,
            1,
            MAX_PAGES,
            0,
            self.negotiated >> 32,
            self._max_stack_depth if self.has_passthrough else 0,
            0,
            bytes(22),
        )
        self._log.negotiated(answer)
        return answer

    def _interrupt(self, _nodeid: int, body: memoryview, _caller: Caller) -> Payload:
        # Requests are read in order, so a request that is not waiting has been answered. With a
        # resent request the kernel resends its INTERRUPT as well.
        (unique,) = protocol.INTERRUPT_IN.unpack_from(body)
        if (waiting := self._waiting.get(unique & _UNMARKED)) is not None:
            self._interrupts.note(unique & _UNMARKED, waiting)
        return None
