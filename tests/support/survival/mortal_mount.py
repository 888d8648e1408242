"""A writable mount without a kernel: what it keeps on the disk outlives its processes.

`MortalMount` has one process after the other serve, each going
on with the journal, the staged files and the records that the last one left.
"""

import itertools
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from fusefs.cache.downloader import Downloader
from fusefs.cache.evictor import Evictor
from fusefs.cache.file_cache import FileCache
from fusefs.cache.passthrough import PassthroughFiles
from fusefs.cache.quota import Quota
from fusefs.posix.directory.listings import Directories
from fusefs.posix.journal.journal import Journal
from fusefs.posix.journal.records import KernelState
from fusefs.posix.mount_state import MountState
from fusefs.posix.nodes.handles import HandleTable
from fusefs.posix.nodes.inode_table import Attributes, Inode, InodeTable, Ownership
from fusefs.posix.nodes.notifier import KernelNotifier
from fusefs.posix.operations import Operations
from fusefs.posix.restore import leftovers
from fusefs.posix.restore.from_journal import restore
from fusefs.posix.types import Caller, NameKind, NewAttributes
from fusefs.posix.write.aborts import PendingAborts
from fusefs.posix.write.rules import WriteRules, Writing
from fusefs.posix.write.staging import Staging
from fusefs.settings.patterns import PathRules
from fusefs.settings.types import Durability
from fusefs.store.errors import StoreError
from tests.support.memory_store import MemoryStore

LOCAL = PathRules(Durability.LOCAL)


class DiedError(BaseException):
    """The process has been killed."""


def die(*_: object, **__: object) -> None:
    raise DiedError


@dataclass
class Names:
    """A directory buffer that takes all."""

    is_plus: bool = True
    takes_names: bool = True
    names: list[str] = field(default_factory=list)
    # By name.
    offsets: dict[str, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.names

    def add(self, name: bytes, _inode: Inode, offset: int, _valid_s: float) -> bool:
        return self._add(name.decode(), offset)

    def add_name(self, name: bytes, _ino: int, offset: int, _kind: NameKind) -> bool:
        return name in (b".", b"..") or self._add(name.decode(), offset)

    def _add(self, name: str, offset: int) -> bool:
        self.names.append(name)
        self.offsets[name] = offset
        return True


class Process:
    """One process of a mount, as a program sees it. Paths are relative to the mount."""

    def __init__(self, operations: Operations, uniques: Iterable[int], store: MemoryStore) -> None:
        self.operations = operations
        self.adopted = 0  # files that earlier mounts have left
        self.store = store
        self.changes = operations.mutations.changes
        self.writer = operations.mutations.writer
        self._uniques = iter(uniques)

    def caller(self, unique: int | None = None) -> Caller:
        return Caller(next(self._uniques) if unique is None else unique, 0, 0, 1)

    async def node(self, path: str) -> Inode:
        """Look a path up, as the kernel does for each call.

        Raises:
            FileNotFoundError: there is nothing.
        """
        inode = self.operations.inodes.root
        for name in filter(None, path.encode().split(b"/")):
            found = await answered(self.operations.lookup(inode.nodeid, name, self.caller()))
            if found.inode is None:
                raise FileNotFoundError(path)
            inode = found.inode
        return inode

    async def _split(self, path: str) -> tuple[Inode, str]:
        above, _, name = path.rpartition("/")
        return await self.node(above), name

    async def mkdir(self, path: str, unique: int | None = None) -> None:
        await self.changes.mkdir(*await self._split(path), 0o755, self.caller(unique))

    async def symlink(self, path: str, target: bytes, unique: int | None = None) -> None:
        await self.changes.symlink(*await self._split(path), target, self.caller(unique))

    async def unlink(self, path: str, unique: int | None = None) -> None:
        await self.changes.unlink(*await self._split(path), self.caller(unique))

    async def rmdir(self, path: str, unique: int | None = None) -> None:
        await self.changes.rmdir(*await self._split(path), self.caller(unique))

    async def rename(
        self, old: str, new: str, *, flags: int = 0, unique: int | None = None
    ) -> None:
        parted = await self._split(old)
        with suppress(FileNotFoundError):
            await self.node(old)
        with suppress(FileNotFoundError):
            await self.node(new)
        await self.changes.rename(parted, await self._split(new), flags, self.caller(unique))

    async def create(self, path: str, data: bytes) -> int:
        """A new file that is open for writing, with some content."""
        parent, name = await self._split(path)
        mutations, mode = self.operations.mutations, stat.S_IFREG | 0o644
        flags = os.O_RDWR | os.O_TRUNC
        _, opened = await answered(
            mutations.create(parent.nodeid, name.encode(), mode, flags, self.caller())
        )
        await self.write(opened.fh, 0, data)
        return opened.fh

    async def write(self, fh: int, offset: int, data: bytes, *, is_appended: bool = False) -> None:
        answer = self.writer.write(fh, offset, memoryview(data), is_appended=is_appended)
        assert await answered(answer) == len(data)

    async def close(self, fh: int) -> None:
        await answered(self.writer.flusher.flush(fh))
        await answered(self.operations.release(fh))

    async def save(self, path: str, data: bytes) -> None:
        """A new file, written and closed."""
        await self.close(await self.create(path, data))

    async def overwrite(self, path: str, data: bytes) -> None:
        """Give a file another content, as `open(path, "wb")` does."""
        fh = await self.open(path, os.O_WRONLY | os.O_TRUNC)
        await self.write(fh, 0, data)
        await self.close(fh)

    async def set_attributes(self, file: str | Inode, **new: int) -> None:
        """Change attributes of a path or of a node; they have the names of `NewAttributes`."""
        inode = await self.node(file) if isinstance(file, str) else file
        await answered(self.operations.mutations.setattr(inode.nodeid, NewAttributes(**new)))

    async def set_xattr(self, inode: Inode, name: bytes, value: bytes) -> None:
        setxattr = self.operations.mutations.setxattr
        await answered(setxattr(inode.nodeid, name, value, 0, self.caller()))

    async def stat(self, inode: Inode) -> Attributes:
        """The attributes of a node, once they are known."""
        return self.operations.attributes(await answered(self.operations.getattr(inode.nodeid)))

    async def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        inode = await self.node(path)
        return (await answered(self.operations.open(inode.nodeid, flags, self.caller()))).fh

    async def read(self, fh: int, offset: int = 0, size: int = 1 << 20) -> bytes:
        return bytes(await answered(self.operations.read(fh, offset, size)))

    async def load(self, path: str) -> bytes:
        """A file, opened and read."""
        fh = await self.open(path)
        try:
            return await self.read(fh)
        finally:
            await answered(self.operations.release(fh))

    async def opendir(self, path: str = "") -> int:
        inode = await self.node(path)
        return self.operations.opendir(inode.nodeid, self.caller())[0].fh

    async def readdir(self, fh: int, offset: int = 0) -> dict[str, int]:
        """The names behind an offset, each with its own, up to the end."""
        found: dict[str, int] = {}
        while True:
            more = Names()
            await answered(self.operations.readdir(fh, offset, more))
            if not more.names:
                return found
            found |= more.offsets
            offset = more.offsets[more.names[-1]]

    async def listing(self, path: str = "") -> list[str]:
        fh = await self.opendir(path)
        found = await self.readdir(fh)
        self.operations.releasedir(fh)
        return list(found)


class MortalMount:
    """A mount of a bucket of its own; its state is kept in `directory`."""

    def __init__(self, directory: Path, *, cache: Path | None = None) -> None:
        self.directory = directory
        self._cache = cache or directory / "cache"
        self.store = MemoryStore()
        # What of the bucket the next process mounts.
        self.prefix = ""
        # Requests that the next process takes for begun, beside those on record.
        self.begun: set[int] = set()
        self.ttl_s = 60.0
        # More nodes than this are too many.
        self.most_nodes = sys.maxsize
        self.backing: PassthroughFiles = PassthroughFiles(why="no kernel")
        self._mounted_ns = 1
        self._uniques = itertools.count(2, 2)
        self._is_mounted = False
        self.alive: Callable[[], None] = lambda: None

    def new_unique(self) -> int:
        return next(self._uniques)

    def reboot(self) -> None:
        """Forget what ends with the machine: the next process mounts anew."""
        self._is_mounted = False
        self._mounted_ns += 1

    @asynccontextmanager
    async def killed(self, **rules: Any) -> AsyncIterator[Process]:
        """As `serving`, of a process that is killed where `DiedError` is raised, or at the end."""
        try:
            async with self.serving(**rules) as process:
                yield process
                raise DiedError
        except* DiedError:
            pass

    @asynccontextmanager
    async def serving(self, **rules: Any) -> AsyncIterator[Process]:
        """A process: the first of a mount, or the next one of it."""
        self.directory.mkdir(exist_ok=True)
        quota = Quota(self.directory, None, lambda _size: 0)
        cache = FileCache(
            self._cache,
            "test",
            quota,
            backing=self.backing,
            on_discard=lambda file: operations.discarded(file),
        )
        journal, state = self._journal()
        ended = ExitStack()
        try:
            async with trio.open_nursery() as nursery:
                notifier = KernelNotifier()
                inodes = InodeTable(self.prefix, journal, notifier, most=self.most_nodes)
                directories = Directories(self.store, inodes, PathRules(self.ttl_s), nursery)
                mount_state = MountState(
                    store=self.store,
                    directories=directories,
                    cache=cache,
                    downloader=Downloader(self.store, Evictor(cache), nursery),
                    backing=self.backing,
                    journal=journal,
                    inodes=inodes,
                    handles=HandleTable(journal),
                    owner=Ownership(0, 0, 0o644, 0o755),
                    mounted_ns=self._mounted_ns,
                    notifier=notifier,
                    begun=self.begun if state is None else self.begun | state.begun,
                )
                operations = Operations(
                    mount_state, self._writing(nursery, cache, WriteRules(**rules))
                )
                ended.callback(os.close, operations.mutations.writer.empties.fd)
                process = Process(operations, self._uniques, self.store)
                if state is not None:
                    await restore(operations, state, {}, self.alive)
                else:
                    operations.log_table(journal)
                    process.adopted = leftovers.adopt(process.writer, self.alive)
                nursery.start_soon(operations.mutations.changes.run)
                try:
                    yield process
                finally:
                    journal.close(remove=False)
                    nursery.cancel_scope.cancel()
        except BaseException:
            cache._catalog.close()
            ended.callback(close_all, self._cache)
            raise
        finally:
            ended.callback(close_all, self.directory / "staging")
            ended.close()
        await cache.aclose(sync=False)

    def _journal(self) -> tuple[Journal, KernelState | None]:
        path = self.directory / "journal"
        if self._is_mounted:
            return Journal.resume(path)
        self._is_mounted = True
        return Journal(path), None

    def _writing(self, nursery: trio.Nursery, cache: FileCache, rules: WriteRules) -> Writing:
        staging = self.directory / "staging" / str(self._mounted_ns)
        renames = self.directory / "renames"
        for directory in (staging, renames):
            directory.mkdir(parents=True, exist_ok=True)

        async def make_room() -> None:
            pass

        own = Staging(staging, "test", cache=cache)
        aborts = PendingAborts(staging, nursery, self.store)
        return Writing(own, renames, nursery, rules, make_room, aborts)


def close_all(directory: Path) -> None:
    """Close what a process had open below a directory, as the kernel does at its end."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{directory}/"):
                os.close(int(fd))


async def answered(answer: Any) -> Any:
    """An answer that is there, or has to be waited for; errors are those that programs get."""
    try:
        return await answer if hasattr(answer, "__await__") else answer
    except StoreError as error:
        raise OSError(error.errno, str(error)) from error
