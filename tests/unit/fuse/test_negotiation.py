"""Flags that are agreed upon with the kernel, and requests that meet a fault."""

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest
import trio

from fusefs.fuse import protocol, read_handlers
from fusefs.fuse.interrupts import Callers
from fusefs.fuse.notifier import DeviceNotifier
from fusefs.fuse.protocol import Fopen, Init, Opcode
from fusefs.fuse.pyfuse3_session import Pyfuse3Handlers
from fusefs.fuse.read_handlers import drops_pages, open_out
from fusefs.fuse.session import Session, UnsupportedKernelError
from fusefs.posix.types import OpenResult
from tests.support.semantics import states

EVERYTHING = (1 << 64) - 1
NEEDED = Init.PARALLEL_DIROPS | Init.MAX_PAGES | Init.DO_READDIRPLUS
# A reading ahead of 128 KiB, as the kernel offers it.
READ_AHEAD = 131072
UNIQUE = 77


class Kernel:
    """The other end of a session's descriptor."""

    def __init__(self) -> None:
        self.end, self._its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._its.setblocking(False)
        self.log: list[bytes] = []
        inodes = SimpleNamespace(find=lambda _nodeid: None)  # for a request that took long
        self.operations: Any = SimpleNamespace(mutations=None, inodes=inodes)
        self.start()

    def start(self) -> None:
        """Begin a session, or the next one."""
        log: Any = SimpleNamespace(negotiated=self.log.append)
        self.notifications = DeviceNotifier(self._its.fileno(), Callers())
        self.session = Session(self._its.fileno(), self.operations, log, has_fast_path=False)

    def close(self) -> None:
        self.end.close()
        self._its.close()

    def offer(self, flags: int, minor: int = protocol.MINOR) -> None:
        """Send INIT, as long as an interface of that age has it."""
        low, high = flags & 0xFFFFFFFF, flags >> 32
        body = protocol.INIT_IN.pack(protocol.MAJOR, minor, READ_AHEAD, low, high, bytes(44))
        self.ask(Opcode.INIT, body if minor >= 36 else body[: protocol.INIT_IN_SHORT.size])

    def ask(self, opcode: Opcode, body: bytes, unique: int = UNIQUE) -> None:
        size = protocol.IN_HEADER.size + len(body)
        self.end.send(protocol.IN_HEADER.pack(size, opcode, unique, 0, 0, 0, 0, 0, 0) + body)

    def notification(self) -> tuple[int, bytes]:
        """What the session wrote next, behind a request's number or a notification's code."""
        message = self.end.recv(1 << 16)
        size, error, unique = protocol.OUT_HEADER.unpack_from(message)
        assert size == len(message)
        if unique:
            assert error == 0
        return unique or error, message[protocol.OUT_HEADER.size :]


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    one = Kernel()
    yield one
    one.close()


async def negotiated(
    kernel: Kernel, flags: int, minor: int = protocol.MINOR
) -> tuple[Init, dict[str, int]]:
    """What becomes of an offer: the flags, and the other fields of the answer."""
    kernel.offer(flags, minor)
    await kernel.session.negotiate()
    unique, answer = kernel.notification()
    assert unique == UNIQUE
    assert kernel.log == [answer]
    names = [name for name, _ in protocol.INIT_OUT.fields]
    fields = dict(zip(names, protocol.INIT_OUT.unpack_from(answer), strict=True))
    return Init(fields["flags"] | fields["flags2"] << 32), fields


async def test_all_that_helps_is_taken_from_a_kernel_that_offers_everything(kernel: Kernel) -> None:
    flags, fields = await negotiated(kernel, EVERYTHING)
    assert flags == (
        NEEDED
        | Init.ASYNC_READ
        | Init.ATOMIC_O_TRUNC
        | Init.BIG_WRITES
        | Init.ASYNC_DIO
        | Init.CACHE_SYMLINKS
        | Init.HANDLE_KILLPRIV_V2
        | Init.INIT_EXT
        | Init.PASSTHROUGH
        | Init.HAS_RESEND
        | Init.ALLOW_IDMAP
    )
    assert fields["max_pages"] * 4096 == fields["max_write"] == 1 << 20
    assert fields["max_readahead"] == READ_AHEAD
    assert fields["max_stack_depth"] == 1
    assert kernel.session.has_passthrough
    assert kernel.session.survival[0]


async def test_nothing_is_taken_that_was_not_offered(kernel: Kernel) -> None:
    flags, fields = await negotiated(kernel, NEEDED | Init.INIT_EXT)
    assert flags == NEEDED | Init.INIT_EXT
    assert fields["max_stack_depth"] == 0
    assert not kernel.session.has_passthrough
    is_on, why = kernel.session.survival
    assert not is_on
    assert "Linux 6.9" in why


async def test_an_offer_of_the_first_32_flags_alone_is_understood(kernel: Kernel) -> None:
    flags, _ = await negotiated(kernel, EVERYTHING & ~Init.INIT_EXT, minor=35)
    assert NEEDED in flags
    assert flags >> 32 == 0
    assert Init.INIT_EXT not in flags


@pytest.mark.parametrize(
    ("flags", "minor"),
    [
        (EVERYTHING, protocol.OLDEST_MINOR - 1),
        (EVERYTHING & ~Init.MAX_PAGES, protocol.MINOR),
        (EVERYTHING & ~Init.PARALLEL_DIROPS, protocol.MINOR),
        (EVERYTHING & ~Init.DO_READDIRPLUS, protocol.MINOR),
    ],
)
async def test_a_kernel_that_is_too_old_is_named_with_what_to_do(
    kernel: Kernel, flags: int, minor: int
) -> None:
    kernel.offer(flags, minor)
    with pytest.raises(UnsupportedKernelError, match=r"too old .* use --session pyfuse3"):
        await kernel.session.negotiate()


async def test_no_notification_makes_the_kernel_wait(kernel: Kernel) -> None:
    await negotiated(kernel, EVERYTHING)
    kernel.notifications.invalidate_attributes(5)
    code, body = kernel.notification()
    assert code == protocol.NOTIFY_INVAL_INODE_CODE
    node, offset, _ = protocol.NOTIFY_INVAL_INODE.unpack_from(body)
    assert node == 5
    assert offset < 0, "with its pages, it would wait for whoever reads them"
    kernel.notifications.invalidate_names()
    assert kernel.notification() == (protocol.NOTIFY_INC_EPOCH_CODE, b"")
    kernel.session.adopt(kernel.log[0], is_all_answered=False)
    assert kernel.notification() == (protocol.NOTIFY_RESEND_CODE, b"")


@pytest.mark.parametrize("is_masked", [True, False])
async def test_a_kernel_that_cannot_resend_is_taken_over_where_nothing_is_left_unanswered(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, is_masked: bool
) -> None:
    await negotiated(kernel, EVERYTHING & ~Init.HAS_RESEND if is_masked else EVERYTHING)
    if not is_masked:

        def refuse(*_: object) -> int:
            raise OSError(errno.EINVAL, "what a kernel says to a notification it does not know")

        monkeypatch.setattr(os, "write", refuse)
    kernel.session.adopt(kernel.log[0], is_all_answered=True)
    assert not kernel.session.has_resend
    assert not kernel.session.survival[0]
    with pytest.raises(BlockingIOError):
        kernel.end.recv(1, socket.MSG_DONTWAIT)
    with pytest.raises(UnsupportedKernelError, match="may have left some unanswered"):
        kernel.session.adopt(kernel.log[0], is_all_answered=False)


def fail_at_once(*_: object) -> None:
    raise ValueError("so it goes")


async def fail_later(*_: object) -> None:
    await trio.lowlevel.checkpoint()
    raise ValueError("so it goes")


@pytest.mark.parametrize("fail", [fail_at_once, fail_later])
@states(
    "A request that no daemon can answer for a fault of its own is EIO for the program "
    "that sent it, and does not end the mount."
)
async def test_a_request_that_meets_a_fault_ends_the_daemon_once_and_is_eio_then(
    kernel: Kernel, caplog: pytest.LogCaptureFixture, fail: Callable[..., object]
) -> None:
    await negotiated(kernel, EVERYTHING)
    kernel.operations.lookup = fail
    kernel.ask(Opcode.LOOKUP, b"name\0")
    with pytest.raises(ExceptionGroup) as ended:
        await kernel.session.run()
    assert ended.group_contains(ValueError, match="so it goes")
    kernel.start()
    again = UNIQUE | protocol.UNIQUE_RESEND
    kernel.ask(Opcode.LOOKUP, b"name\0", again)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kernel.session.run)
        await trio.lowlevel.wait_readable(kernel.end)
        nursery.cancel_scope.cancel()
    size = protocol.OUT_HEADER.size
    assert kernel.end.recv(1 << 16) == protocol.OUT_HEADER.pack(size, -errno.EIO, again)
    assert "so it goes" in caplog.text


@pytest.mark.parametrize(
    ("release", "does"),
    [
        ("4.20.0", False),
        ("5.14.0-503.11.1.el9_5.x86_64", False),
        ("6.1.176", False),
        ("6.18", False),
        ("6.18.2-arch1", False),
        ("6.18.3", True),
        ("6.18.44-cloud", True),
        ("6.19.0-rc1", True),
        ("7.0.1", True),
        ("unknown", False),
    ],
)
def test_kernels_that_drop_pages_of_what_is_written_past_them_are_known(
    release: str, *, does: bool
) -> None:
    assert drops_pages(release) == does


@pytest.mark.parametrize("does", [True, False])
def test_what_is_written_goes_past_the_pages_of_a_kernel_that_drops_them(
    monkeypatch: pytest.MonkeyPatch, *, does: bool
) -> None:
    monkeypatch.setattr(read_handlers, "_DROPS_PAGES", does)
    reply = open_out(OpenResult(1, keep_cache=True, may_write=True, is_direct=True))
    _, flags, _ = protocol.OPEN_OUT.unpack_from(reply)
    assert flags == (Fopen.DIRECT_IO if does else Fopen.KEEP_CACHE)


async def test_a_request_that_meets_a_fault_of_ours_is_eio_and_the_mount_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("so it goes")

    operations: Any = SimpleNamespace(lookup=fail)
    caller: Any = SimpleNamespace(uid=0, gid=0, pid=1)
    with caplog.at_level(logging.ERROR), pytest.raises(pyfuse3.FUSEError) as error:
        await Pyfuse3Handlers(operations).lookup(1, b"name", caller)
    assert error.value.errno == errno.EIO
    assert "so it goes" in caplog.text
