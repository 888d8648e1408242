"""Caches of identities that no pod on the node has any more: how long they stay, and how they go.

Keys that were rotated, volumes that were deleted, pods that moved on leave
their domains' caches behind. One that no mount has used for `KEEP_S` goes; and
sooner, the one that was used last going last, when the disk has less space or
inodes free than it should, or uids run out. When a domain was used is its
directory's time.

What a volume wrote and never uploaded is not ours to remove: it is said once,
and stays, with its uid. The next mount of the volume uploads it.

A cache that goes gets another name first, under which no mount finds it. It is
emptied by a process of its own user, which gets at nothing else
(fusefs/cache/purge.py); what is killed halfway goes on at the next look.
Nothing is touched as long as anything is mounted in it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from csi.identities.cache_domains import Domains, Unused
from csi.volume.options import Shares
from fusefs.api import MIN_FREE, SHARE, MountSettings, kernel_mounts, resolve_path

log = logging.getLogger(__name__)

EVERY_S = 300.0
KEEP_S = 14 * 86_400.0
# Also when space is scarce: a pod that is replaced may be back soon.
KEEP_IF_SCARCE_S = 900.0
LOOK_TIMEOUT_S = 60.0
REMOVAL = [sys.executable, "-P", "-m", "fusefs.cache.purge"]


class CacheCollector(threading.Thread):
    """Looks at the domains now and then.

    `used` tells the settings of all mounts, as JSON; `shares` what caches leave free.
    """

    def __init__(self, domains: Domains, used: Callable[[], list[str]], shares: Shares) -> None:
        super().__init__(name="cache collector", daemon=True)
        self._domains = domains
        self._used = used
        self._min_free = MIN_FREE.read(shares.min_free)
        self._min_free_inodes = SHARE.read(shares.min_free_inodes)
        self._told: set[str] = set()
        self._ending = threading.Event()

    def run(self) -> None:
        while not self._ending.wait(EVERY_S):
            try:
                self.collect()
            except Exception:
                log.exception("looking after unused caches failed")

    def stop(self) -> None:
        self._ending.set()

    def collect(self) -> None:
        """Remove what has to go now."""
        for directory in self._domains.leaving():
            self._finish(directory)
        self._domains.touch(self._names_in_use())
        for domain in self._domains.unused():
            if self._ending.is_set():
                return
            is_old = domain.unused_s >= KEEP_S
            if is_old or (domain.unused_s >= KEEP_IF_SCARCE_S and self._is_scarce()):
                self._remove_unused(domain)

    def _names_in_use(self) -> set[str]:
        # One that can't be read ends the round: it may be anybody's.
        used = (MountSettings.from_json(text, is_newer=True) for text in self._used())
        return {settings.cache_dir.name for settings in used}

    def _is_scarce(self) -> bool:
        """Whether the disk has less free than caches have to leave, or the uids are used up."""
        status = os.statvfs(self._domains.directory)
        free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
        return (
            self._domains.lacks_uids
            or free < self._min_free.bytes_of(size)
            or status.f_favail < self._min_free_inodes.bytes_of(status.f_files)
        )

    def _remove_unused(self, domain: Unused) -> None:
        with self._domains.alone():
            # Somebody may have come for it since.
            if domain.name in self._names_in_use() or not self._domains.is_unchanged(domain):
                return
            if _has_mounts(domain.directory):
                log.warning("%s stays: something is mounted there", domain.directory)
                return
            told = _run("look", domain.directory, domain.uid)
            if told is None or json.loads(told)["is_used"]:
                return
            if leftovers := json.loads(told)["leftovers"]:
                if domain.name not in self._told:
                    self._told.add(domain.name)
                    log.warning(
                        "%s has %d files that were written and never uploaded: they are kept",
                        domain.directory,
                        leftovers,
                    )
                    _run("cache", domain.directory, domain.uid)
                return
            leaving = self._domains.set_aside(domain)
        log.info("%s was not used for %.0f h: removed", domain.directory, domain.unused_s / 3600)
        self._finish(leaving)

    def _finish(self, directory: Path) -> None:
        """Remove a directory that no mount finds any more."""
        uid = directory.lstat().st_uid
        if not _has_mounts(directory) and _run("all", directory, uid) is not None:
            directory.rmdir()


def _has_mounts(directory: Path) -> bool:
    real = resolve_path(directory)
    return any(one.mountpoint.is_relative_to(real) for one in kernel_mounts())


def _run(what: str, directory: Path, uid: int) -> str | None:
    """What a process of this user tells about a directory, or has done to it; None if it failed."""
    if uid == 0:
        log.warning("%s is root's, and no cache of ours", directory)
        return None
    # Without what may be a secret of the driver's.
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
