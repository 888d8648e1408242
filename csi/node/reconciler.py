"""Brings the mounts into the state that their records and pods need, every few seconds.

A killed driver leaves unused mounts, directories of mounts that have ended, and, if the descriptor
store holds their connections, mounts that wait for a daemon. The reconciler finds all of them from
the records and mountinfo.

Volumes are reconciled in parallel, because a mount that hangs may take a minute. At most `AT_ONCE`
volumes are reconciled at a time, not counting those that have taken `WORKING_S` seconds already.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from csi.errors import AbortedError, CsiError
from csi.in_flight import Claims
from csi.node.bind_mount import MountTable
from csi.node.drain import Drains, UploadingError
from csi.node.mount_record import MountRecord
from csi.node.mounts import Mounts
from csi.node.warmup import Warmups
from fusefs.launch.control import ControlError

log = logging.getLogger(__name__)

EVERY_S = 5.0
# Time limit for resuming a mount.
START_S = 60.0
# Few at a time, because resuming a mount costs half a second of processor time.
AT_ONCE = 4
# A volume that takes longer counts as waiting, not as working.
WORKING_S = 3.0


class Reconciler(threading.Thread):
    """A thread that reconciles all volumes every `EVERY_S` seconds."""

    def __init__(self, mounts: Mounts, claims: Claims, draining: Drains, warming: Warmups) -> None:
        super().__init__(name="reconciler", daemon=True)
        self._mounts = mounts
        self._claims = claims
        self._drains = draining
        self._warmups = warming
        self._ending = threading.Event()
        self._lock = threading.Condition()
        self._in_progress: dict[str, float] = {}  # start times, by volume

    def run(self) -> None:
        while not self._ending.is_set():
            try:
                self.reconcile_all()
            except Exception:
                log.exception("reconciling the mounts failed")
            self._ending.wait(EVERY_S)

    def stop(self) -> None:
        """Start no more reconciliations; do not wait for any. The next driver does the rest."""
        self._ending.set()

    def reconcile_all(self) -> None:
        """Start the reconciliation of each volume, then remove leftovers without a record."""
        volumes: dict[str, list[MountRecord]] = {}
        for record in self._mounts.records.all():
            volumes.setdefault(record.volume_id, []).append(record)
        for volume_id, records in volumes.items():
            if self._ending.is_set():
                return
            if self._wait_for_turn(volume_id):
                self._start(volume_id, records)
        self._remove_leftovers()

    def _start(self, volume_id: str, records: list[MountRecord]) -> None:
        # Not in a pool, because the interpreter waits for a pool's threads at exit.
        thread = threading.Thread(
            target=self._reconcile_volume, args=(volume_id, records), name="reconcile", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads are allowed
            self._finish(volume_id)
            raise

    def _finish(self, volume_id: str) -> None:
        with self._lock:
            del self._in_progress[volume_id]
            self._lock.notify()

    def _wait_for_turn(self, volume_id: str) -> bool:
        """Wait for one of `AT_ONCE` places; False at once if the volume is in progress already."""
        with self._lock:
            if volume_id in self._in_progress:
                return False
            while self._count_working() >= AT_ONCE:
                self._lock.wait(WORKING_S)
            self._in_progress[volume_id] = time.monotonic()
        return True

    def _count_working(self) -> int:
        now = time.monotonic()
        return sum(now - since < WORKING_S for since in self._in_progress.values())

    def _reconcile_volume(self, volume_id: str, records: list[MountRecord]) -> None:
        try:
            with self._claims.claim(volume_id):
                for record in records:
                    self._try_reconcile(record)
        except AbortedError:
            pass  # a call for this volume is under way
        finally:
            self._finish(volume_id)

    def _try_reconcile(self, record: MountRecord) -> None:
        try:
            self._reconcile(record.key)
        except AbortedError:
            pass  # the next round continues
        except (CsiError, OSError, ControlError) as error:
            log.warning("%s: %s", record.source, error)
        except Exception:
            log.exception("reconciling %s failed", record.source)

    def _reconcile(self, key: str) -> None:
        record = self._mounts.records.read(key)
        if record is None:
            return  # the mount has ended meanwhile
        table = MountTable()
        is_awaited = self._warmups.is_awaited(record.key)
        if not self._mounts.references(record.key, table) and not is_awaited:
            with contextlib.suppress(UploadingError):
                self._drains.check(record)
                if self._drains.end(record, time.monotonic()):
                    self._warmups.forget(record.key)
                return
            record = self._mounts.records.read(key) or record  # has the drain's beginning now
        self._mounts.ensure_held(record, time.monotonic() + START_S)

    def _remove_leftovers(self) -> None:
        """End mounts without a record; remove their directories, also those left by a reboot."""
        for key in self._mounts.unknown():
            try:
                # A publish call that makes the mount anew claims `key` before it writes the record.
                with self._claims.claim(key):
                    is_call_here = self._mounts.records.read(key) is not None  # made meanwhile
                    if not is_call_here and not self._mounts.references(key, MountTable()):
                        self._mounts.end_key(key, time.monotonic())  # else unpublish ends it
            except (AbortedError, OSError) as error:
                log.info("tried again later: %s", error)
