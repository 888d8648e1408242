"""Removes the caches of identities that no pod on the node uses any more.

A cache that no mount has used for `KEEP_S` is removed. If the disk lacks free space or inodes, or
uids run out, caches are removed sooner, the longest unused first. The modification time of a
domain's directory is the time of its last use. Files that were never uploaded are logged once and
stay, with their uid: the volume's next mount of the same identity uploads them.

First the cache is renamed, or moved out of its directory, so that no mount finds it or waits for
the removal. Then a process of the cache's own user, which can access nothing else, removes the
cache (fusefs/cache/purge.py). The next round continues a removal that was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from csi.identities.cache_domains import CacheDomains, DomainOnDisk
from csi.volume.options import NodeShares
from fusefs.launch.registry import resolve as resolve_path
from fusefs.linux.mountinfo import kernel_mounts
from fusefs.settings.types import FREE_INODES

log = logging.getLogger(__name__)

EVERY_S = 300.0
KEEP_S = 14 * 86_400.0
# An unused cache stays for this long even if space is scarce: a replaced pod may be back soon.
KEEP_IF_SCARCE_S = 900.0
# Time limit for the look at a cache, during which new mounts wait for the lock of the domains.
LOOK_TIMEOUT_S = 10.0
REMOVAL = [sys.executable, "-P", "-m", "fusefs.cache.purge"]


class CacheCollector(threading.Thread):
    """A thread that removes unused caches, every `EVERY_S` seconds.

    `shares` has the space that must stay free.
    """

    def __init__(self, domains: CacheDomains, shares: NodeShares) -> None:
        super().__init__(name="cache collector", daemon=True)
        self._domains = domains
        self._shares = shares
        self._logged: set[str] = set()
        self._ending = threading.Event()

    def run(self) -> None:
        while not self._ending.wait(EVERY_S):
            try:
                self.collect()
            except Exception:
                log.exception("removing unused caches failed")

    def stop(self) -> None:
        self._ending.set()

    def collect(self) -> None:
        """Remove the caches whose time is over, after finishing earlier removals."""
        for directory in self._domains.leaving():
            with _keeping_no_other():
                self._finish(directory)
        self._domains.touch(self._domains.in_use())
        for domain in self._domains.by_last_use():
            if self._ending.is_set():
                return
            unused_s = time.time() - domain.used_ns / 1e9
            if unused_s >= KEEP_S or (unused_s >= KEEP_IF_SCARCE_S and self._is_scarce()):
                with _keeping_no_other():
                    self._remove_unused(domain)

    def _is_scarce(self) -> bool:
        """True if the disk has too little free space or too few inodes, or no uid is free."""
        status = os.statvfs(self._domains.directory)
        free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
        return (
            self._domains.lacks_uids
            or free < self._shares.min_free.bytes_of(size)
            or status.f_favail < FREE_INODES.bytes_of(status.f_files)
        )

    def _remove_unused(self, domain: DomainOnDisk) -> None:
        with self._domains.alone():
            # A mount may have claimed the domain meanwhile, and ended again.
            is_unchanged = domain.directory.lstat().st_mtime_ns == domain.used_ns
            if domain.name in self._domains.in_use() or not is_unchanged:
                return
            if _has_mounts(domain.directory):
                log.warning("%s stays: something is mounted there", domain.directory)
                return
            output = _run("look", domain.directory, domain.uid)
            if output is None or json.loads(output)["is_used"]:
                return
            leftovers = json.loads(output)["leftovers"]
            if leftovers and domain.name in self._logged:
                return
            leaving = self._domains.set_aside(domain, keeps_state=leftovers > 0)
        if leftovers:
            self._logged.add(domain.name)
            log.warning(
                "%s has %d files that were never uploaded: they are kept",
                domain.directory,
                leftovers,
            )
        else:
            hours = (time.time() - domain.used_ns / 1e9) / 3600
            log.info("%s was not used for %.0f h: removed", domain.directory, hours)
        self._finish(leaving)

    def _finish(self, directory: Path) -> None:
        """Remove a directory that `CacheDomains.set_aside` has moved away from all mounts."""
        uid = directory.lstat().st_uid
        if uid == 0:
            # The process that made the directory was killed before chown.
            try:
                directory.rmdir()
            except OSError as error:
                log.warning(
                    "%s belongs to root, so it is no cache of the driver: %s", directory, error
                )
        elif not _has_mounts(directory) and _run("all", directory, uid) is not None:
            directory.rmdir()


@contextlib.contextmanager
def _keeping_no_other() -> Iterator[None]:
    """Log an OSError of the block: a hostile identity must not stop the other removals."""
    try:
        yield
    except OSError as error:
        log.warning("tried again later: %s", error)


def _has_mounts(directory: Path) -> bool:
    real = resolve_path(directory)
    return any(mount.mountpoint.is_relative_to(real) for mount in kernel_mounts())


def _run(what: str, directory: Path, uid: int) -> str | None:
    """Run purge.py `look` or `all` (`what`) as user `uid`; return its output, None if it fails."""
    if uid == 0:
        log.warning("%s belongs to root, so it is no cache of the driver", directory)
        return None
    # Without variables that may hold secrets of the driver.
    plain = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    try:
        done = subprocess.run(
            [*REMOVAL, what, os.fspath(directory)],
            user=uid,
            group=uid,
            extra_groups=[],
            cwd="/",
            env=plain,
            text=True,
            capture_output=True,
            check=False,
            timeout=LOOK_TIMEOUT_S if what == "look" else None,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s: %s", directory, error)
        return None
    if done.returncode:
        log.warning("%s: %s", directory, done.stderr.strip())
        return None
    return done.stdout
