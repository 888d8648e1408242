"""The daemon of one mount: builds all parts and runs their tasks in one nursery.

The daemon sends a first request to the bucket, which shows most mistakes of users, opens the cache,
mounts, and serves. When any process unmounts the file system, all other tasks are cancelled, the
cache's catalog is written, and the daemon's process ends.

SIGTERM and SIGINT unmount; a mount that is in use is detached, and ends with its last user or with
a second signal. SIGUSR2 logs the waiting requests and the downloads.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.disk import CacheDirectoryError, usable
from fusefs.cache.downloader import Downloader
from fusefs.cache.evictor import Evictor
from fusefs.cache.integrity.scrub import Scrub
from fusefs.cache.passthrough import PassthroughFiles
from fusefs.daemon import control_socket, setup
from fusefs.daemon.access_guard import AccessGuard
from fusefs.daemon.jobs.cache_warmer import CacheWarmer
from fusefs.daemon.jobs.local_copies import LocalCopies
from fusefs.daemon.jobs.selection import Selector
from fusefs.daemon.takeover import (
    Takeover,
    TakeoverError,
    late_requests_directory,
    renames_directory,
    staging_directory,
    state_directory,
)
from fusefs.fuse.control_files import ControlFiles
from fusefs.fuse.interrupts import Callers
from fusefs.fuse.notifier import DeviceNotifier
from fusefs.fuse.session import Session, UnsupportedKernelError
from fusefs.keeper.client import KeeperError
from fusefs.launch import registry
from fusefs.launch.control import ControlError, Message
from fusefs.linux import fuse_connection, mount, mountinfo
from fusefs.linux.mount import MountError
from fusefs.linux.unmount import UnmountError, umount_path
from fusefs.planning.plans import Plans
from fusefs.planning.prefetcher import Prefetcher
from fusefs.posix.directory.head_policy import HeadPolicy
from fusefs.posix.directory.listings import Directories
from fusefs.posix.journal.journal import Journal
from fusefs.posix.late.repair import Repairer
from fusefs.posix.late.uncertain_keys import UncertainKeys
from fusefs.posix.late.watched_store import WatchedStore
from fusefs.posix.mount_state import MountState
from fusefs.posix.nodes.handles import HandleTable
from fusefs.posix.nodes.inode_table import InodeTable, Ownership
from fusefs.posix.nodes.name_pruner import NamePruner
from fusefs.posix.nodes.notifier import KernelNotifier
from fusefs.posix.nodes.object_metadata import Form
from fusefs.posix.operations import Operations
from fusefs.posix.restore import leftovers as recovery
from fusefs.posix.restore.from_journal import restore
from fusefs.posix.write.aborts import PendingAborts
from fusefs.posix.write.rules import WriteRules, Writing
from fusefs.posix.write.staging import Staging
from fusefs.settings.display import human_size
from fusefs.settings.memory import MemoryBudget
from fusefs.settings.mount import MountSettings, SettingsError
from fusefs.settings.types import Conflict, SessionKind
from fusefs.store.errors import StoreError
from fusefs.store.interface import ObjectInfo, UnansweredChanges
from fusefs.store.probing import Prober
from fusefs.store.s3.store import open_store
from fusefs.telemetry.activity import ACTIVITY

if TYPE_CHECKING:
    from fusefs.cluster_cache.cluster_cache import ClusterCache
    from fusefs.fuse.pyfuse3_session import PyfuseSession

logger = logging.getLogger("fusefs.daemon")

USER_ERRORS = (
    StoreError,
    CacheDirectoryError,
    KeeperError,
    MountError,
    TakeoverError,
    UnsupportedKernelError,
    registry.MountsError,
    SettingsError,
)
INIT_TIMEOUT_S = 30
# New Python objects between two garbage collections: with the usual 700, fetching small files
# costs the event loop 3% to 7% more.
GARBAGE_AFTER = 10_000
COMPACT_EVERY_S = 10.0
# The longest wait of a new mount for the answers to the prober's first requests.
PROBE_S = 2.0
# The user is warned if the cache has room for fewer bytes than this.
LEAST_ROOM = 64 << 20
# The pause between a daemon's attempts, after a takeover, to register its mount for commands.
REGISTER_EVERY_S = 5.0
# Signals within this time are one: systemd, batch systems and shutdowns signal every process of a
# service or job, so the daemon gets a signal of its own and the copy that its keeper sends it.
TOGETHER_S = 1.0
# A function that is called when the mount answers, with warnings for the user.
Ready = Callable[[list[str]], None]


class Daemon:
    """One mount with all its parts; calls `answer` for commands and `log_waiting` on SIGUSR2."""

    def __init__(
        self,
        settings: MountSettings,
        answer: Callable[[Daemon, Message], Message | Awaitable[Message]],
        log_waiting: Callable[[Daemon], None],
    ) -> None:
        self.settings = settings
        self._answer = answer
        self._log_waiting = log_waiting
        self._budget = MemoryBudget.of(settings.memory_limit)
        self.started = time.monotonic()
        self.loop_busy_s = 0.0
        self.session: Session | PyfuseSession | None = None
        # None on a read-only mount.
        self.watched: WatchedStore | None = None
        self.unanswered = UnansweredChanges()
        self.cluster_cache: ClusterCache | None = None
        self._takeover: Takeover | None = None
        self._is_unmounted = False

    async def run(self, ready: Ready) -> None:
        """Mount or take over, call `ready(warnings)`, serve to the end; may raise USER_ERRORS."""
        if self.settings.session != SessionKind.PYFUSE3:
            self._takeover = await Takeover.begin(self.settings)
        async with open_store(setup.s3_settings(self.settings), self._described) as self.store:
            if self._takeover is None or self._takeover.checks_first:
                await self.store.check(self.settings.source.prefix)
            if self._takeover is not None and not self._takeover.is_fresh:
                await self._takeover.take()
            await self._open_cache()
            why_not = "--no-delete" if self.settings.no_delete else ""
            self.prober = Prober(
                self.store,
                self.settings.source.prefix,
                self.cache.directory,
                self._identity,
                fails_on_conflict=self._is_strict,
                why_not="a read-only mount" if self.settings.read_only else why_not,
            )
            await self.prober.recall()
            if self._is_strict and self._is_fresh:
                await self.prober.require_strict()
            async with trio.open_nursery() as nursery:
                self._build(nursery)
                nursery.start_soon(_watch_signals, self._unmount, partial(self._log_waiting, self))
                try:
                    await self._serve(nursery, ready)
                finally:
                    nursery.cancel_scope.cancel()
            if self.watched is not None:
                self.watched.close(remove=self._is_unmounted)
            await self.cache.aclose(sync=self._is_unmounted)
            if self._takeover is not None:
                self._takeover.keeper.ending()

    def _build(self, nursery: trio.Nursery) -> None:
        """Create the parts that do not need the FUSE session; their tasks run in `nursery`."""
        self._nursery = nursery
        prefix = self.settings.source.prefix
        allowed = setup.s3_settings(self.settings)
        if self.settings.cluster_cache is not None:
            self.cluster_cache = self._make_cluster_cache(nursery)
        filler = self.cluster_cache.filler if self.cluster_cache is not None else None
        self.downloader = Downloader(
            self.store if self.cluster_cache is None else self.cluster_cache.tier,
            self.evictor,
            nursery,
            unkept=self._budget.unkept,
            most_parts=allowed.max_streams,
            most_small=allowed.max_connections,
            on_fetched=filler.fetched if filler is not None else None,
        )
        if self.cluster_cache is not None:
            nursery.start_soon(self.cluster_cache.run)
        self.scrub = Scrub(self.cache.residency.pages, self.cache.integrity)
        selector = Selector(self.store, prefix)
        self.warmer = CacheWarmer(
            self.store, self.cache, self.downloader, self.settings, selector, filler
        )
        self.local_copies = LocalCopies(
            self.cache,
            self.evictor,
            selector,
            prefix,
            nursery,
            self._pending,
            self.warmer.cancel_pins,
        )

    def _make_cluster_cache(self, nursery: trio.Nursery) -> ClusterCache:
        # Imported here, because most mounts have no cluster cache.
        from fusefs.cluster_cache.cluster_cache import ClusterCache
        from fusefs.cluster_cache.remote import BlockBucket

        place = self.settings.cluster_cache
        assert place is not None
        access, key = setup.cluster_cache_settings(self.settings)
        return ClusterCache(
            self.settings,
            BlockBucket(access, place.prefix, self.store.requester.engine),
            key,
            self.store,
            self.cache,
            nursery,
            lambda: self.downloader.under_way > 0,
        )

    def _pending(self, key: str) -> tuple[int, int]:
        """Return the number and the bytes of files at or below a key that wait for upload."""
        writer = self.operations.writer
        staged = writer.backlog.files(key) if writer is not None else []
        return len(staged), sum(file.size() for file in staged)

    async def _open_cache(self) -> None:
        settings = self.settings
        directory = settings.cache_dir / self._principal_directory()
        is_fresh = self._is_fresh
        opening = partial(setup.open_cache, in_any_case=not is_fresh)
        self.backing = self._backing_files()
        self.cache = await trio.to_thread.run_sync(
            opening, settings, directory, self._identity, self.backing, self._discarded
        )
        self.evictor = Evictor(self.cache)
        if self._takeover is not None and is_fresh:
            self._takeover.remember(directory.name)

    def _discarded(self, file: CacheFile) -> None:
        self.operations.discarded(file)

    @property
    def _identity(self) -> str:
        """Identity of the bucket in records on the disk: `ENDPOINT/BUCKET` or `aws/BUCKET`."""
        return f"{self.settings.endpoint_url or 'aws'}/{self.settings.source.bucket}"

    @property
    def _is_fresh(self) -> bool:
        """True for a new mount, False for a mount that is taken over."""
        return self._takeover is None or self._takeover.is_fresh

    @property
    def _is_strict(self) -> bool:
        return self.settings.conflict == Conflict.FAIL and not self.settings.read_only

    def _principal_directory(self) -> str:
        """Return the cache subdirectory's name; may raise TakeoverError or CacheDirectoryError."""
        takeover = self._takeover
        if takeover is not None and not takeover.is_fresh:
            # The recorded name is used, because finding the credentials' owner takes a second.
            return takeover.recall()
        principal = "shared" if self.settings.shared_cache else self.store.principal
        return hashlib.blake2b(principal.encode(), digest_size=8).hexdigest()

    async def _serve(self, nursery: trio.Nursery, ready: Ready) -> None:
        is_pyfuse = self.settings.session == SessionKind.PYFUSE3
        opened = self._pyfuse_session() if is_pyfuse else self._kernel_session(nursery)
        async with opened as session:
            self.session = session
            mountpoint = self.settings.mountpoint
            try:
                self._watch_rights(nursery)
                await self._register(nursery)
                if isinstance(session, Session):
                    assert self._takeover is not None
                    # Sent after the registration, because it makes `fusefs upgrade` return.
                    self._takeover.serving(has_resend=session.has_resend)
                async with trio.open_nursery() as serving:
                    serving.start_soon(self._until_ended, session, serving)
                    await trio.to_thread.run_sync(mount.raise_read_ahead, mountpoint)
                    if self.operations.mutations is not None:
                        nursery.start_soon(self.prober.run)
                        with trio.move_on_after(PROBE_S if self._is_fresh else 0.0):
                            await self.prober.has_tried.wait()
                    if self._is_gone():
                        raise MountError(f"the mount on {mountpoint} ended at once; see the log")
                    logger.info("serving %s on %s", self.settings.source, mountpoint)
                    gc.freeze()
                    gc.set_threshold(GARBAGE_AFTER)
                    gc.enable()
                    ready(self._warnings())
                    nursery.start_soon(self.cache.run)
                    nursery.start_soon(self.evictor.run)
                    nursery.start_soon(self.name_pruner.run)
                    nursery.start_soon(self.scrub.run)
                    nursery.start_soon(self.warmer.run, self._takeover, self.operations.head_cache)
                    nursery.start_soon(self.plans.run, not self._is_fresh)
                    if self.operations.mutations is not None:
                        nursery.start_soon(self.operations.mutations.writer.backlog.run)
                        nursery.start_soon(self.operations.mutations.changes.run)
                    if self.watched is not None:
                        repairer = Repairer(self.watched, self.operations.show_repaired)
                        nursery.start_soon(repairer.run)
                    serving.start_soon(self._compact)
            finally:
                if self._is_unmounted or self._takeover is None:
                    registry.unregister(mountpoint, pid=os.getpid())

    async def _register(self, nursery: trio.Nursery) -> None:
        """Let commands find and ask this mount; if that fails, raise in a new mount, else retry."""
        try:
            await self._answer_commands(nursery)
        except (OSError, registry.MountsError) as error:
            if self._is_fresh:
                raise
            # Programs are served all the same; the disk of /run may have room later.
            logger.error("commands do not find this mount for now: %s", error)
            nursery.start_soon(self._register_later, nursery)

    async def _register_later(self, nursery: trio.Nursery) -> None:
        while True:
            await ACTIVITY.pause(REGISTER_EVERY_S, idle_s=REGISTER_EVERY_S)
            with suppress(OSError, registry.MountsError):
                await self._answer_commands(nursery)
                logger.info("commands find this mount again")
                return

    async def _answer_commands(self, nursery: trio.Nursery) -> None:
        mountpoint = self.settings.mountpoint
        writer = self.operations.writer
        staging = writer.staging.directory if writer is not None else None
        registry.register(mountpoint, str(self.settings.source), os.getpid(), staging)
        socket = registry.mount_directory(mountpoint) / "status.sock"
        await nursery.start(control_socket.serve, socket, partial(self._answer, self))

    def _warnings(self) -> list[str]:
        settings, warnings = self.settings, []
        if self.prober.denial:
            warnings.append(
                f"these credentials may not write to {settings.source} ({self.prober.denial}):"
                " files that programs write stay on this machine. Mount with --read-only, or with"
                " credentials that have s3:PutObject"
            )
        if settings.source.prefix and self.store.is_prefix_empty:
            warnings.append(f"{settings.source} is empty. Is the prefix spelled correctly?")
            # Logged as INFO, because each new volume of a Kubernetes claim begins empty.
            logger.info("%s", warnings[-1])
        room = self.cache.quota.limit
        if room < LEAST_ROOM:
            why = f" ({limit_why})" if (limit_why := self.cache.quota.limit_why) else ""
            warnings.append(
                f"the cache in {settings.cache_dir} has room for {human_size(room)}{why}: files"
                " that do not fit are read from S3 each time. Make room, or see --cache-dir,"
                " --cache-size and --min-free"
            )
        if settings.cluster_cache is not None and settings.cluster_cache_key is None:
            warnings.append(
                f"anyone who may write to {settings.cluster_cache} can change the data that this"
                " mount reads; --cluster-cache-key prevents that"
            )
            logger.warning("%s", warnings[-1])
        return warnings

    def _is_gone(self) -> bool:
        if self._takeover is not None:
            return fuse_connection.is_disconnected(self._takeover.fd)
        return mountinfo.find_mount(self.settings.mountpoint) is None

    def _watch_rights(self, nursery: trio.Nursery) -> None:
        """Start the access guard, which shuts the cache if S3 refuses all requests."""
        settings = self.settings
        record = registry.directory_of(settings.mountpoint) / "refused"
        self.access_guard = AccessGuard(
            self.store, settings.source.prefix, settings.revoke_after, record, self._shut
        )
        self.access_guard.recall()
        nursery.start_soon(self.access_guard.run)

    def _shut(self, is_shut: bool) -> None:
        self.operations.is_shut = is_shut
        self.backing.drop_unused()
        # The kernel must drop the names that it has cached.
        self.operations.notifier.invalidate_names()

    async def _until_ended(self, session: Session | PyfuseSession, serving: trio.Nursery) -> None:
        self._is_unmounted = await session.run()
        if self._is_unmounted and self.operations.writer is not None:
            await self.operations.writer.backlog.drain(self.settings.retry_time)
        how = "unmounted" if self._is_unmounted else "leaving to another daemon:"
        logger.info("%s %s", how, self.settings.mountpoint)
        serving.cancel_scope.cancel()

    def _operations(
        self,
        log: Journal,
        notifier: KernelNotifier,
        *,
        mounted_ns: int,
        begun: Set[int] = frozenset(),
        ids_are_inos: bool = False,
    ) -> Operations:
        settings = self.settings
        owner = Ownership(
            settings.uid if settings.uid is not None else os.geteuid(),
            settings.gid if settings.gid is not None else os.getegid(),
            settings.file_mode,
            settings.dir_mode,
            settings.shared_group,
            Form[settings.attribute_form.name],
        )
        self._log = log
        writing = None if settings.read_only else self._writing(mounted_ns)
        inodes = InodeTable(
            settings.source.prefix,
            log,
            notifier,
            ids_are_inos=ids_are_inos,
            most=self._budget.names,
        )
        changed = None if settings.read_only else self.cache.directory / "changed"
        self.directories = Directories(
            self.watched or self.store,
            inodes,
            settings.metadata_ttl,
            self._nursery,
            HeadPolicy(changed, is_read_only=settings.read_only),
            self._budget.entries,
        )
        state = MountState(
            store=self.watched or self.store,
            directories=self.directories,
            cache=self.cache,
            downloader=self.downloader,
            backing=self.backing,
            journal=log,
            inodes=inodes,
            handles=HandleTable(log),
            owner=owner,
            mounted_ns=mounted_ns or time.time_ns(),
            notifier=notifier,
            endpoint=settings.endpoint_url or "",
            begun=begun,
        )
        self.operations = Operations(state, writing)
        head_cache = self.operations.head_cache
        prefix = settings.source.prefix
        prefetcher = Prefetcher(prefix, self.directories, head_cache, self.cache, self.downloader)
        self.plans = Plans(state_directory(settings) / "plans", prefix, self.cache, prefetcher)
        self.name_pruner = NamePruner(inodes, notifier.prune_names)
        return self.operations

    def _writing(self, mounted_ns: int) -> Writing:
        settings, identity = self.settings, self._identity
        with usable(settings.cache_dir):
            late = UncertainKeys(late_requests_directory(settings, mounted_ns), identity)
            staged = staging_directory(settings, mounted_ns)
            staging = Staging(staged, identity, settings.staging_size, self.cache, late)
            self.cache.disk.lock_as(str(staged))
            renames = renames_directory(settings)
            aborts = PendingAborts(staged, self._nursery, self.store)
        self.watched, self.unanswered = WatchedStore(self.store, late, aborts), late
        rules = WriteRules(
            durability=settings.durability,
            prefix=settings.source.prefix,
            fails_on_conflict=settings.conflict == Conflict.FAIL,
            may_delete=not settings.no_delete,
            uploads=2 * self.store.requester.settings.max_streams,
        )
        return Writing(staging, renames, self._nursery, rules, self.evictor.tend, aborts)

    def _described(self, info: ObjectInfo) -> None:
        """Pass an object's metadata, from the answer to a GET, to the head cache."""
        self.operations.head_cache.described(info)

    @asynccontextmanager
    async def _kernel_session(self, nursery: trio.Nursery) -> AsyncIterator[Session]:
        """Mount or take over; yield the session; then close /dev/fuse and the journal."""
        settings, takeover = self.settings, self._takeover
        assert takeover is not None
        if takeover.is_fresh:
            await takeover.mount()
        log, state = await takeover.open_journal()
        passthrough = self.backing if self.backing.can_register else None
        depth = mount.stack_depth(settings.cache_dir) if passthrough is not None else 0
        mounted_ns = time.time_ns() if state is None else state.mounted_ns
        callers = Callers(takeover)
        notifier = DeviceNotifier(takeover.fd, callers)
        begun = frozenset() if state is None else state.begun
        operations = self._operations(log, notifier, mounted_ns=mounted_ns, begun=begun)
        session = Session(
            takeover.fd,
            operations,
            log,
            max_stack_depth=depth,
            callers=callers,
            control=None if settings.no_control_files else self._control_files(operations),
        )
        nursery.start_soon(takeover.keep, lambda: len(session.waiting), passthrough)
        try:
            if state is None:
                with trio.fail_after(INIT_TIMEOUT_S):
                    await session.negotiate()
                operations.log_table(log)
                if operations.writer is not None:
                    recovery.adopt(operations.writer, takeover.keeper.alive)
            else:
                assert takeover.taken is not None
                backing, alive = takeover.taken.backing, takeover.keeper.alive
                await restore(operations, state, backing, alive)
                if passthrough is not None:
                    whole = await self.cache.whole_files({st_ino for _, st_ino in backing.values()})
                    handles = operations.handles.files.values()
                    opened = [(handle.file, handle.backing_id) for handle in handles]
                    passthrough.take_over(backing, opened, whole)
                try:
                    session.adopt(state.init_out, is_all_answered=takeover.taken.is_all_answered)
                except UnsupportedKernelError as error:
                    raise TakeoverError(str(error)) from error
            if passthrough is not None:
                await passthrough.turn_on(session.has_passthrough, self.cache.directory)
            nursery.start_soon(self._leave_when_quiesced, takeover, session)
            yield session
        finally:
            os.close(takeover.fd)
            log.close(remove=self._is_unmounted or (takeover.is_fresh and self.session is None))

    def _control_files(self, operations: Operations) -> ControlFiles:
        async def ask(request: Message) -> Message:
            try:
                answer = self._answer(self, request)
                return answer if isinstance(answer, dict) else await answer
            except ControlError as error:
                raise OSError(errno.EINVAL, str(error)) from None

        return ControlFiles(ask, lambda: operations.attributes(operations.inodes.root))

    def _backing_files(self) -> PassthroughFiles:
        takeover = self._takeover
        if takeover is None:
            return PassthroughFiles(why="the pyfuse3 session has none")
        if self.settings.passthrough == "off":
            return PassthroughFiles(why="turned off by --passthrough off")
        if takeover.is_fresh and not takeover.is_privileged:
            return PassthroughFiles(why="needs CAP_SYS_ADMIN: mount as root")
        return PassthroughFiles(takeover.keeper)

    async def _leave_when_quiesced(self, takeover: Takeover, session: Session) -> None:
        """Stop reading requests when the keeper sends QUIESCE; the next daemon reads the rest."""
        await takeover.keeper.quiesced.wait()
        session.stop_reading()

    @asynccontextmanager
    async def _pyfuse_session(self) -> AsyncIterator[PyfuseSession]:
        from fusefs.fuse.pyfuse3_session import PyfuseNotifications, PyfuseSession

        operations = self._operations(
            Journal(None), PyfuseNotifications(), mounted_ns=time.time_ns(), ids_are_inos=True
        )
        if operations.writer is not None:
            recovery.adopt(operations.writer)
        session = PyfuseSession(self.settings.mount_request, operations)
        with session.mounted():
            yield session

    async def _compact(self) -> None:
        """Rewrite the journal whenever it has grown too much, until cancelled."""
        log = self._log
        while True:
            await ACTIVITY.pause(COMPACT_EVERY_S, idle_s=2 * COMPACT_EVERY_S)
            if log.wants_compaction and log.begin_compaction():
                await self.operations.write_all(log)
                log.finish_compaction()

    async def _unmount(self) -> None:
        mountpoint = self.settings.mountpoint
        if self._takeover is not None and self._takeover.is_privileged:
            self._takeover.keeper.unmount()
            return
        try:
            await trio.to_thread.run_sync(lambda: umount_path(mountpoint, is_lazy=False))
        except UnmountError as error:
            logger.warning("can't unmount, detaching instead: %s", error)
            try:
                await trio.to_thread.run_sync(lambda: umount_path(mountpoint, is_lazy=True))
            except UnmountError as error:  # it is detached already
                logger.warning("can't detach: %s", error)


async def _watch_signals(
    unmount: Callable[[], Awaitable[None]], log_waiting: Callable[[], None]
) -> None:
    """Handle SIGUSR2 (log) and SIGTERM and SIGINT (unmount, the second time exit)."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGUSR2) as received:
        async with trio.open_nursery() as nursery:
            asked = None
            async for number in received:
                if number == signal.SIGUSR2:
                    log_waiting()
                elif asked is None:
                    asked = trio.current_time()
                    nursery.start_soon(unmount)
                elif trio.current_time() >= asked + TOGETHER_S:
                    logger.warning("ending with the mount still in use")
                    os._exit(1)
