"""The takeover: a daemon gets its mount from the keeper, and later leaves it to the next daemon.

The keeper (keeper/main.py) starts each daemon of a mount with one of three tasks:

- *fresh*: nothing is mounted. The daemon checks everything, then asks the keeper to mount.
- *take over*: the last daemon died. The daemon takes the descriptor, reads the last daemon's
  journal and serves. It sends no request to the bucket before it answers the kernel.
- *prepare*: an upgrade, in which the last daemon still serves. The daemon checks everything, and
  reads the journal as a trial.

When keeper and broker are both gone, the daemon continues to serve, but no other daemon follows.
A daemon that a supervisor has started gets a new keeper, over the socket to the supervisor.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import trio

from fusefs.cache.disk import STATE, CacheDirectoryError, usable
from fusefs.cache.passthrough import PassthroughFiles
from fusefs.keeper import protocol, supervisor_protocol
from fusefs.keeper.client import KeeperClient, KeeperError, TakenMount
from fusefs.keeper.protocol import FRESH, PREPARE
from fusefs.launch import registry
from fusefs.linux import files, fuse_connection, mount, mountinfo, sockets
from fusefs.linux.mount import MountError
from fusefs.posix.journal import journal
from fusefs.posix.journal.journal import Journal
from fusefs.posix.journal.records import KernelState, UnusableJournalError, replay
from fusefs.settings.mount import MountSettings

logger = logging.getLogger("fusefs.daemon.takeover")

Result = TypeVar("Result")


class TakeoverError(Exception):
    """The mount cannot be taken over; the message is for the log."""


def state_directory(settings: MountSettings) -> Path:
    """Return the directory for state that outlives the daemon, and even the mount."""
    return settings.cache_dir / STATE / registry.mount_directory(settings.mountpoint).name


def staging_directory(settings: MountSettings, mounted_ns: int) -> Path:
    """Make and return the directory for written files of the mount made at `mounted_ns`."""
    directory = state_directory(settings) / "staging" / str(mounted_ns)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def renames_directory(settings: MountSettings) -> Path:
    """Make, if it is missing, and return the directory for records of renamed directories."""
    directory = state_directory(settings) / "renames"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def late_requests_directory(settings: MountSettings, mounted_ns: int) -> Path:
    """Return the directory for records of change requests to S3 that have no answer yet."""
    return state_directory(settings) / "late" / str(mounted_ns)


class Takeover:
    """One daemon's communication with its keeper, by which it gets its mount; made by `begin`."""

    def __init__(self, settings: MountSettings, keeper: KeeperClient, task: int) -> None:
        self._settings = settings
        self.keeper = keeper
        self._task = task
        self.is_privileged = False
        self._supervisor: socket.socket | None = None
        self._has_resend = False
        self.fd = -1
        # The number of the mount's connection, or 0.
        self._connection = 0
        self.taken: TakenMount | None = None

    @classmethod
    async def begin(cls, settings: MountSettings) -> Takeover:
        """Send HELLO to the keeper that started this process; KeeperError without a keeper."""
        sock = sockets.inherited(protocol.ENVIRONMENT)
        if sock is None:
            raise KeeperError("the daemon is started by `fusefs mount`, through a keeper")
        keeper = KeeperClient(sock)
        welcome = await keeper.hello()
        takeover = cls(settings, keeper, welcome.task)
        takeover._connection = welcome.connection
        takeover.is_privileged = welcome.is_privileged
        takeover._supervisor = sockets.inherited(supervisor_protocol.ENVIRONMENT)
        return takeover

    @property
    def is_fresh(self) -> bool:
        """True if nothing is mounted yet, so that this daemon must mount."""
        return self._task == FRESH

    @property
    def checks_first(self) -> bool:
        """True if the daemon checks the bucket before it serves: new mounts and upgrades."""
        return self._task in (FRESH, PREPARE)

    @property
    def _directory(self) -> Path:
        return state_directory(self._settings)

    def remember(self, cache: str) -> None:
        """Record the name of the mount's cache subdirectory; may raise CacheDirectoryError."""
        with usable(self._settings.cache_dir):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.replace(self._directory / "cache", cache)

    def recall(self) -> str:
        """Return the name that `remember` recorded.

        Raises:
            TakeoverError: there is no record.
            CacheDirectoryError: the record can't be read.
        """
        try:
            return (self._directory / "cache").read_text()
        except FileNotFoundError as error:
            raise TakeoverError(f"what the last daemon knew can't be read: {error}") from error
        except OSError as error:
            raise CacheDirectoryError(f"{self._directory} can't be read: {error}") from error

    async def take(self) -> None:
        """Receive an existing mount from the keeper; in an upgrade, after the old daemon's end.

        Raises:
            TakeoverError: the journal can't be used.
            CacheDirectoryError: the journal can't be read now.
        """
        if self._task == PREPARE:
            await self._read(lambda path: replay(path, is_live=True))
            self.keeper.prepared()
        self.taken = await self.keeper.take()
        self.fd = self.taken.fd

    async def mount(self) -> None:
        """Mount by the keeper or fusermount3, and set `fd`; raise MountError with one sentence."""
        settings = self._settings
        if self.is_privileged:
            try:
                self.fd = await self.keeper.mount()
            except OSError as error:
                raise MountError(
                    f"can't mount on {settings.mountpoint}: {error.strerror}"
                ) from error
            os.set_blocking(self.fd, False)
            return
        self.fd = await trio.to_thread.run_sync(mount.mount_by_helper, settings.mount_request)
        self.keeper.deposit(self.fd)

    async def open_journal(self) -> tuple[Journal, KernelState | None]:
        """Return a new journal and None, or the last daemon's journal and the state in it.

        Raises:
            TakeoverError: the last daemon's journal can't be used.
            CacheDirectoryError: a new journal can't be written, or the last can't be read now.
        """
        if self.taken is None:
            with usable(self._settings.cache_dir):
                connection = (
                    fuse_connection.number_of(self.fd)
                    or mountinfo.connection_at(str(self._settings.mountpoint))
                    or 0
                )
                _remove_leftovers(self._directory, connection)
                return Journal(journal.path_of(self._directory, connection)), None
        return await self._read(Journal.resume)

    async def _read(self, function: Callable[[Path], Result]) -> Result:
        connection = fuse_connection.number_of(self.fd) or self._connection

        def read() -> Result:
            return function(journal.path_of(self._directory, connection))

        try:
            return await trio.to_thread.run_sync(read)
        except (FileNotFoundError, UnusableJournalError) as error:
            raise TakeoverError(f"what the last daemon knew can't be read: {error}") from error
        except OSError as error:  # no TakeoverError, as the next daemon may succeed
            raise CacheDirectoryError(f"the journal can't be gone on with: {error}") from error

    @property
    def namespace(self) -> int:
        """The PID namespace of the pids in requests; 0 if the keeper can't look these up."""
        return self.keeper.namespace

    async def look_at_process(self, pid: int, ino: int = 0) -> int:
        """Return `pid`'s fate (`FATES`); with `ino`, HOLDS (writes it), HOLDS_NOT or UNKNOWN."""
        return await self.keeper.look_at_process(pid, ino)

    async def keep(self, in_flight: Callable[[], int], files: PassthroughFiles | None) -> None:
        """Send the keeper signs of life, with the number `in_flight()`, until the keeper ends.

        Under a supervisor, each new keeper gets them, too, after the table of passthrough `files`.
        """
        if self._supervisor is None:
            await self.keeper.run(in_flight, self._settings.hang_timeout)
            logger.error("the keeper is gone: the mount ends when this process does")
            return
        sender, keepers = trio.open_memory_channel[socket.socket](1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_hear_supervisor, self._supervisor, sender)
            while True:
                await self.keeper.run(in_flight, self._settings.hang_timeout)
                logger.warning("the keeper is gone: waiting for another")
                keeper = KeeperClient(await keepers.receive())
                for backing_id, inode in files.table() if files is not None else ():
                    keeper.known(backing_id, inode)
                keeper.quiesced = self.keeper.quiesced
                self.keeper = keeper
                self.serving(has_resend=self._has_resend)
                if files is not None:
                    files.move_to(keeper)
                logger.info("another keeper is there")

    def serving(self, *, has_resend: bool) -> None:
        """Tell the keeper that this daemon serves, and if the kernel can resend requests."""
        self._has_resend = has_resend
        self.keeper.serving(has_resend=has_resend)


def _remove_leftovers(directory: Path, connection: int) -> None:
    """Remove ended mounts' journals, if this mount's `connection` is visible. Blocks briefly."""
    known = fuse_connection.numbers()
    if connection not in known:
        return  # this namespace does not show all connections
    for path in directory.glob("journal.*"):
        number = path.name.split(".")[1]
        if number.isdecimal() and int(number) not in known:
            path.unlink(missing_ok=True)


async def _hear_supervisor(
    supervisor: socket.socket, keepers: trio.MemorySendChannel[socket.socket]
) -> None:
    """Send sockets of new keepers to `keepers`; kill this process if the supervisor is gone.

    The keeper then starts another daemon, as it does when this daemon's container ends.
    """
    while True:
        try:
            message = protocol.receive(supervisor, supervisor_protocol.KINDS)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(supervisor)
            continue
        if message is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            await keepers.send(socket.socket(fileno=message.fds[0]))
