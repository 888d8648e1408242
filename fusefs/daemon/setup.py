"""Set-up of a daemon's process: input, log, limits, the cache, and the settings of its parts."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

from fusefs.cache.cached_file import CacheFile
from fusefs.cache.disk import prepare_directory
from fusefs.cache.file_cache import FileCache
from fusefs.cache.passthrough import PassthroughFiles
from fusefs.cache.quota import Quota
from fusefs.daemon import log_handlers
from fusefs.linux.descriptors import raise_limit
from fusefs.settings.memory import MemoryBudget
from fusefs.settings.mount import MountSettings, SettingsError
from fusefs.settings.types import FREE_INODES
from fusefs.store import customer_key
from fusefs.store.s3.settings import S3Settings, WriteOptions

logger = logging.getLogger("fusefs.daemon")


def set_up(settings: MountSettings) -> None:
    """Set up the process: log, stack dumps on SIGUSR1, limit of descriptors, umask 077."""
    log_handlers.set_up(settings)
    # The keeper sends SIGUSR1 to a silent daemon, which then logs its stacks even in a busy loop.
    faulthandler.register(signal.SIGUSR1)
    # systemd ends a session with SIGTERM and SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_limit()
    # Files are created for this user alone, whatever the shell's umask is.
    os.umask(0o077)


def read_input(text: str) -> MountSettings:
    """Return the settings in the launcher's JSON.

    The files in the JSON, which have secrets, are put in memory; environment variables name them.
    """
    given = json.loads(text)
    for variable, content in given["files"].items():
        # A file in memory, since the content has secrets.
        fd = os.memfd_create(variable)
        os.write(fd, content.encode())
        os.environ[variable] = f"/proc/self/fd/{fd}"
    return MountSettings.from_texts(given["settings"])


def open_cache(
    settings: MountSettings,
    directory: Path,
    identity: str,
    backing: PassthroughFiles,
    on_discard: Callable[[CacheFile], None],
    *,
    in_any_case: bool,
) -> FileCache:
    """Open the cache of the bucket `identity` in `directory`; may raise CacheDirectoryError.

    `in_any_case`, as in a takeover: even on a full or bad disk. `on_discard` gets bad cache files.
    """
    prepare_directory(settings.cache_dir, in_any_case=in_any_case)
    floors = settings.min_free.bytes_of, FREE_INODES.bytes_of
    quota = Quota(directory, settings.cache_size, *floors)
    return FileCache(
        directory,
        identity,
        quota,
        most_in_memory=MemoryBudget.of(settings.memory_limit).files,
        in_any_case=in_any_case,
        backing=backing,
        on_discard=on_discard,
    )


def s3_settings(settings: MountSettings) -> S3Settings:
    """Return the store's settings; the memory limit bounds requests. May raise CustomerKeyError."""
    fitting = MemoryBudget.of(settings.memory_limit)
    return S3Settings(
        bucket=settings.source.bucket,
        endpoint_url=settings.endpoint_url,
        region=settings.region,
        profile=settings.profile,
        anonymous=settings.anonymous,
        addressing=settings.addressing,
        max_connections=min(settings.max_connections, fitting.requests),
        max_streams=min(settings.max_connections, fitting.streams),
        retry_time_s=settings.retry_time,
        ca_bundle=str(settings.ca_bundle) if settings.ca_bundle else None,
        requester_pays=settings.requester_pays,
        write_options=WriteOptions.of(settings),
        customer_key=customer_key.find(settings.customer_key),
        fips=settings.fips,
        dual_stack=settings.dual_stack,
    )


def cluster_cache_settings(settings: MountSettings) -> tuple[S3Settings, bytes]:
    """Return the cluster cache's S3 settings and its key; may raise SettingsError. Blocks."""
    from fusefs.cluster_cache import access

    assert settings.cluster_cache is not None
    try:
        keys, key = access.credentials(settings), access.key(settings)
    except access.AccessError as error:
        raise SettingsError(f"cluster cache: {error}") from error
    fitting = MemoryBudget.of(settings.memory_limit)
    reached = S3Settings(
        bucket=settings.cluster_cache.bucket,
        endpoint_url=settings.cluster_cache_endpoint,
        region=settings.region,
        profile=settings.profile if keys is None else None,
        keys=keys,
        anonymous=settings.anonymous and keys is None,
        max_connections=min(settings.max_connections, fitting.requests),
        max_streams=min(settings.max_connections, fitting.streams),
        ca_bundle=str(settings.ca_bundle) if settings.ca_bundle else None,
    )
    return reached, key
