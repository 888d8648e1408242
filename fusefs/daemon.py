"""One mount's process: puts the parts together and owns the nursery they live in.

`fusefs mount` starts `python -m fusefs.daemon`, writes the settings as JSON to
its standard input and reads one line from its standard output:
`{"ready": true, "pid": …}` once the mount answers, or `{"error": "a sentence"}`. With
`--foreground` the command calls `run_foreground` instead.

The order of starting: ask the bucket (most mistakes show there), open the
cache, mount, serve. The order of ending is the reverse: when the file system
has been unmounted, by whomever, everything else is cancelled, the catalog is
brought up to date, and the process ends.

Signals: SIGTERM and SIGINT unmount; a mount that is in use is detached, and
ends with its last user or with a second signal. SIGUSR2 logs what waits for
what, and for how long.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import trio

import fusefs
from fusefs import control, mounts
from fusefs.cache.eviction import Space
from fusefs.cache.fetch import Fetcher
from fusefs.cache.files import CacheDirectoryError, FileCache, prepare_directory
from fusefs.cache.metadata import RememberedPages
from fusefs.kernel import mount
from fusefs.kernel.mount import MountError, MountRequest
from fusefs.kernel.passthrough import NoPassthrough, Passthrough
from fusefs.kernel.session import Session, UnsupportedKernelError, Waiting
from fusefs.kernel.unmount import UnmountError, umount_path
from fusefs.posix.directories import Directories
from fusefs.posix.inodes import Ownership
from fusefs.posix.journal import Journal, NoJournal
from fusefs.posix.operations import Operations
from fusefs.settings import MountSettings, SettingsError
from fusefs.store.clients import S3Settings
from fusefs.store.errors import StoreError
from fusefs.store.s3 import S3Store

logger = logging.getLogger("fusefs.daemon")

USER_ERRORS = (
    StoreError,
    CacheDirectoryError,
    MountError,
    UnsupportedKernelError,
    mounts.MountsError,
    SettingsError,
)
# What may be in memory of one download: the client's buffers and a chunk.
MEMORY_PER_DOWNLOAD = 4 << 20
# What the process takes before it downloads anything.
MEMORY_AT_REST = 96 << 20
INIT_TIMEOUT_S = 30


class RunningSession(Protocol):
    """What the daemon needs of either session."""

    name: str

    @property
    def requests(self) -> int: ...
    @property
    def waiting(self) -> list[Waiting]: ...
    async def run(self) -> None: ...


class Daemon:
    """The parts of one mount. `run` is its whole life."""

    def __init__(self, settings: MountSettings) -> None:
        self.settings = settings
        self._started = time.monotonic()
        self._session: RunningSession | None = None
        self._backing: Passthrough | NoPassthrough = NoPassthrough("not mounted yet")

    async def run(self, ready: Callable[[], None]) -> None:
        """Mount, call `ready`, and serve until unmounted.

        Raises:
            USER_ERRORS: it can't be started; nothing stays mounted.
        """
        self._store = S3Store(_s3_settings(self.settings))
        try:
            await self._store.check(self.settings.source.prefix)
            await self._open_cache()
            async with trio.open_nursery() as nursery:
                self._directories = Directories(
                    self._store, self.settings.metadata_ttl, self._pages, nursery
                )
                self._fetcher = Fetcher(self._store, self._cache, self._space, nursery)
                nursery.start_soon(self._cache.run)
                nursery.start_soon(self._pages.run)
                nursery.start_soon(self._watch_signals)
                try:
                    await self._serve(nursery, ready)
                finally:
                    nursery.cancel_scope.cancel()
            await self._cache.aclose()
            self._pages.close()
        finally:
            with trio.CancelScope(shield=True):
                await self._store.aclose()

    async def _open_cache(self) -> None:
        settings = self.settings
        principal = "shared" if settings.shared_cache else self._store.principal
        digest = hashlib.blake2b(principal.encode(), digest_size=8).hexdigest()
        directory = settings.cache_dir / digest
        identity = f"{settings.endpoint_url or 'aws'}/{settings.source.bucket}"
        self._space = Space(directory, settings.cache_size, settings.min_free.bytes_of)

        def open_all() -> tuple[FileCache, RememberedPages]:
            prepare_directory(settings.cache_dir)
            cache = FileCache(directory, identity, self._space)
            pages = RememberedPages(directory / "metadata", identity, settings.metadata_ttl)
            return cache, pages

        self._cache, self._pages = await trio.to_thread.run_sync(open_all)

    async def _serve(self, nursery: trio.Nursery, ready: Callable[[], None]) -> None:
        is_pyfuse = self.settings.session == "pyfuse3"
        opened = self._pyfuse_session() if is_pyfuse else self._kernel_session()
        async with opened as session:
            self._session = session
            mountpoint = self.settings.mountpoint
            mounts.register(mountpoint, str(self.settings.source), os.getpid())
            try:
                socket = mounts.mount_directory(mountpoint) / "status.sock"
                await nursery.start(control.serve, socket, self._answer)
                async with trio.open_nursery() as serving:
                    serving.start_soon(self._until_unmounted, session, serving)
                    await trio.to_thread.run_sync(mount.raise_read_ahead, mountpoint)
                    if mounts.find_mount(mountpoint) is None:
                        raise MountError(f"the mount on {mountpoint} ended at once; see the log")
                    logger.info("mounted %s on %s", self.settings.source, mountpoint)
                    ready()
                    serving.start_soon(self._compact)
            finally:
                mounts.unregister(mountpoint)

    async def _until_unmounted(self, session: RunningSession, serving: trio.Nursery) -> None:
        await session.run()
        logger.info("unmounted %s", self.settings.mountpoint)
        serving.cancel_scope.cancel()

    def _operations(self, log: Journal | NoJournal, *, ids_are_inos: bool = False) -> Operations:
        settings = self.settings
        owner = Ownership(
            settings.uid if settings.uid is not None else os.geteuid(),
            settings.gid if settings.gid is not None else os.getegid(),
            settings.file_mode,
            settings.dir_mode,
        )
        self._log = log
        self.operations = Operations(
            self._store, self._directories, self._cache, self._fetcher, self._backing, log,
            owner, settings.source.prefix, ids_are_inos=ids_are_inos,
        )  # fmt: skip
        return self.operations

    @asynccontextmanager
    async def _kernel_session(self) -> AsyncIterator[Session]:
        """Mount, negotiate, and hand out the session that serves on."""
        settings = self.settings
        state = settings.cache_dir / "mounts" / mounts.mount_directory(settings.mountpoint).name
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        request = MountRequest(
            str(settings.source), settings.mountpoint, settings.allow_other, settings.read_only
        )
        fd = await trio.to_thread.run_sync(mount.open_mount, request)
        log = Journal(state / "journal")
        try:
            depth = 0
            if settings.passthrough == "off":
                self._backing = NoPassthrough("turned off by --passthrough off")
            elif not mount.may_mount():
                self._backing = NoPassthrough("needs CAP_SYS_ADMIN: mount as root")
            else:
                self._backing = Passthrough(fd)
                depth = mount.stack_depth(settings.cache_dir)
            session = Session(fd, self._operations(log), log, max_stack_depth=depth)
            with trio.fail_after(INIT_TIMEOUT_S):
                await session.negotiate()
            if isinstance(self._backing, Passthrough):
                self._backing.turn_on(session.has_passthrough, self._cache.directory)
                self._cache.on_evict = self._backing.drop
            yield session
        finally:
            if isinstance(self._backing, Passthrough):
                self._backing.close()
            os.close(fd)
            log.close(remove=True)

    @asynccontextmanager
    async def _pyfuse_session(self) -> AsyncIterator[RunningSession]:
        from fusefs.kernel.pyfuse import PyfuseSession

        settings = self.settings
        self._backing = NoPassthrough("the pyfuse3 session has none")
        operations = self._operations(NoJournal(), ids_are_inos=True)
        session = PyfuseSession(
            MountRequest(
                str(settings.source), settings.mountpoint, settings.allow_other, settings.read_only
            ),
            operations,
        )
        with session.mounted():
            yield session

    async def _compact(self) -> None:
        """Rewrite the journal when it has grown, a few items at a time."""
        log = self._log
        while isinstance(log, Journal):
            await trio.sleep(10)
            if log.wants_compaction:
                log.begin_compaction()
                await self.operations.retell(log)
                log.finish_compaction()

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGUSR2) as received:
            ending = False
            async for number in received:
                if number == signal.SIGUSR2:
                    self._log_waiting()
                elif ending:
                    logger.warning("ending with the mount still in use")
                    os._exit(1)
                else:
                    ending = True
                    await self._unmount()

    async def _unmount(self) -> None:
        mountpoint = self.settings.mountpoint
        try:
            await trio.to_thread.run_sync(lambda: umount_path(mountpoint, is_lazy=False))
        except UnmountError as error:
            logger.warning("can't unmount, detaching instead: %s", error)
            await trio.to_thread.run_sync(lambda: umount_path(mountpoint, is_lazy=True))

    def _log_waiting(self) -> None:
        """Answer SIGUSR2."""
        now = time.monotonic()
        waiting = self._session.waiting if self._session is not None else []
        logger.warning("%d requests wait", len(waiting))
        for request in sorted(waiting, key=lambda one: one.since):
            logger.warning("%s", request.describe(now, self.operations))
        for line in self._fetcher.describe():
            logger.warning("%s", line)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("command") != "status":
            raise control.ControlError("the only command is status")
        return self._status()

    def _status(self) -> dict[str, Any]:
        settings, counters = self.settings, self.operations.counters
        used = resource.getrusage(resource.RUSAGE_SELF)
        assert self._session is not None
        return {
            "version": fusefs.__version__,
            "mountpoint": str(settings.mountpoint),
            "source": str(settings.source),
            "read_only": settings.read_only,
            "session": self._session.name,
            "passthrough": {"on": self._backing.is_on, "why": self._backing.why},
            "cache": {
                "directory": str(self._cache.directory),
                "used_bytes": self._space.used,
                "limit_bytes": self._space.limit,
                "files": len(self._cache),
                "hits": counters.hits,
                "hit_bytes": counters.hit_bytes,
                "misses": counters.misses,
                "miss_bytes": counters.miss_bytes,
                "evicted_files": self._cache.evicted,
                "warning": self._cache.warning,
            },
            "s3": self._store.counters(),
            "metadata": {
                "ttl_s": None if math.isinf(settings.metadata_ttl) else settings.metadata_ttl,
                "directories": len(self._directories),
                "nodes": len(self.operations.inodes),
                "hidden_keys": self._directories.hidden.count,
            },
            "requests": {
                "total": self._session.requests,
                "waiting": len(self._session.waiting),
                "downloads": self._fetcher.under_way,
            },
            "daemon": {
                "pid": os.getpid(),
                "rss_bytes": _resident_bytes(),
                "peak_rss_bytes": used.ru_maxrss << 10,
                "cpu_s": used.ru_utime + used.ru_stime,
                "uptime_s": time.monotonic() - self._started,
            },
        }


def _s3_settings(settings: MountSettings) -> S3Settings:
    fitting = max(4, (settings.memory_limit - MEMORY_AT_REST) // MEMORY_PER_DOWNLOAD)
    return S3Settings(
        bucket=settings.source.bucket,
        endpoint_url=settings.endpoint_url,
        region=settings.region,
        profile=settings.profile,
        anonymous=settings.anonymous,
        addressing=settings.addressing,
        max_connections=min(settings.max_connections, fitting),
        retry_time_s=settings.retry_time,
        ca_bundle=str(settings.ca_bundle) if settings.ca_bundle else None,
        requester_pays=settings.requester_pays,
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _raise_descriptor_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _set_up_logging(settings: MountSettings) -> None:
    handler: logging.Handler
    if settings.log_file is None:
        handler = logging.StreamHandler()
    else:
        handler = logging.FileHandler(settings.log_file)
        settings.log_file.chmod(0o600)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("fusefs").setLevel(settings.log_level.upper())
    root.setLevel(logging.WARNING)


def run(settings: MountSettings, ready: Callable[[], None]) -> None:
    """Serve one mount until it is unmounted.

    Raises:
        USER_ERRORS: it can't be started.
    """
    _set_up_logging(settings)
    _raise_descriptor_limit()
    # Files are created for this user alone, whatever the shell's umask is.
    os.umask(0o077)
    try:
        trio.run(Daemon(settings).run, ready)
    except* USER_ERRORS as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error


def run_foreground(settings: MountSettings) -> int:
    """Serve in this process; the exit status of the command."""
    try:
        run(settings, lambda: None)
    except USER_ERRORS as error:
        print(f"fusefs: {error}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """`python -m fusefs.daemon`: see the module's text."""

    def tell(message: dict[str, Any]) -> None:
        """Write the one line, and let go of the pipe."""
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.close(null)

    try:
        run(
            MountSettings.from_json(sys.stdin.read()),
            lambda: tell({"ready": True, "pid": os.getpid()}),
        )
    except USER_ERRORS as error:
        tell({"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
