"""The parts of one mount, as its status and its metrics are read from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from fusefs.cache.downloader import Downloader
from fusefs.cache.file_cache import FileCache
from fusefs.cache.integrity.scrub import Scrub
from fusefs.daemon.access_guard import AccessGuard
from fusefs.daemon.jobs.cache_warmer import CacheWarmer
from fusefs.daemon.jobs.local_copies import LocalCopies
from fusefs.fuse.passthrough import PassthroughFiles
from fusefs.fuse.session import RunningSession
from fusefs.planning.plans import Plans
from fusefs.posix.directory.listings import Directories
from fusefs.posix.nodes.name_pruner import NamePruner
from fusefs.posix.operations import Operations
from fusefs.settings.mount import MountSettings
from fusefs.store.interface import UnansweredChanges
from fusefs.store.s3.store import S3Store

if TYPE_CHECKING:
    from fusefs.cluster_cache.cluster_cache import ClusterCache


class MountParts(Protocol):
    """The parts of one mount that its status and its metrics are read from."""

    settings: MountSettings
    started: float
    loop_busy_s: float  # as it was reported last
    session: RunningSession | None
    backing: PassthroughFiles
    store: S3Store
    cache: FileCache
    downloader: Downloader
    directories: Directories
    operations: Operations
    name_pruner: NamePruner
    unanswered: UnansweredChanges
    cluster_cache: ClusterCache | None
    scrub: Scrub
    warmer: CacheWarmer
    local_copies: LocalCopies
    plans: Plans
    access_guard: AccessGuard
