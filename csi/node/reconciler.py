"""What has to be done though nobody calls: after a restart, and now and then.

A driver that was killed leaves mounts that nobody uses, directories of mounts
that are no more, and, where another process held their connections, mounts
that wait for a daemon. All of it shows in the records and in mountinfo.

Volumes are seen to beside each other, as one that hangs may take a minute: so
many at a time that the processor is the limit, and more while those wait.
"""

from __future__ import annotations

import logging
import threading
import time

from csi.errors import AbortedError, CsiError
from csi.in_flight import Claims
from csi.node.bind_mount import Table
from csi.node.drain import Draining
from csi.node.mount_record import MountRecord
from csi.node.mounts import Mounts
from csi.node.warmup import Warming
from fusefs.api import ControlError

log = logging.getLogger(__name__)

EVERY_S = 5.0
# For a mount that is gone on with.
START_S = 60.0
# Going on with a mount is half a second's work of a processor, and two processes more.
AT_ONCE = 4
# One that takes longer waits for something, and keeps nobody else from his turn.
WORKING_S = 3.0


class Caretaker(threading.Thread):
    """Looks after everything once, and again every `EVERY_S`."""

    def __init__(
        self, mounts: Mounts, claims: Claims, draining: Draining, warming: Warming
    ) -> None:
        super().__init__(name="caretaker", daemon=True)
        self._mounts = mounts
        self._claims = claims
        self._draining = draining
        self._warming = warming
        self._ending = threading.Event()
        self._lock = threading.Condition()
        self._under_care: dict[str, float] = {}  # volumes, and since when

    def run(self) -> None:
        while not self._ending.is_set():
            try:
                self.look_round()
            except Exception:
                log.exception("looking after the mounts failed")
            self._ending.wait(EVERY_S)

    def stop(self) -> None:
        """Begin with nothing more. What is under way is left to whoever comes next."""
        self._ending.set()

    def look_round(self) -> None:
        """See to each volume that has no call under way; return when all of them were begun."""
        volumes: dict[str, list[MountRecord]] = {}
        for record in self._mounts.records.all():
            volumes.setdefault(record.volume_id, []).append(record)
        for volume_id, records in volumes.items():
            if self._ending.is_set():
                return
            if self._wait_for_turn(volume_id):
                # Not of a pool, whose threads the end of the process would wait for.
                threading.Thread(
                    target=self._see_to, args=(volume_id, records), name="care", daemon=True
                ).start()
        self._remove_leftovers()

    def _wait_for_turn(self, volume_id: str) -> bool:
        """Wait until few are at work; False if this volume is still under care."""
        with self._lock:
            if volume_id in self._under_care:
                return False
            while self._count_working() >= AT_ONCE:
                self._lock.wait(WORKING_S)
            self._under_care[volume_id] = time.monotonic()
        return True

    def _count_working(self) -> int:
        now = time.monotonic()
        return sum(now - since < WORKING_S for since in self._under_care.values())

    def _see_to(self, volume_id: str, records: list[MountRecord]) -> None:
        try:
            with self._claims.claim(volume_id):
                for record in records:
                    self._try_to_look_after(record)
        except AbortedError:
            pass  # somebody else is at it
        finally:
            with self._lock:
                del self._under_care[volume_id]
                self._lock.notify()

    def _try_to_look_after(self, record: MountRecord) -> None:
        try:
            self._look_after(record)
        except AbortedError:
            pass  # it takes its time
        except (CsiError, OSError, ControlError) as error:
            log.warning("%s: %s", record.source, error)
        except Exception:
            log.exception("looking after %s failed", record.source)

    def _look_after(self, record: MountRecord) -> None:
        if self._mounts.records.read(record.key) is None:
            return  # ended meanwhile
        table = Table()
        is_expected = self._warming.is_expected(record.key)
        if not self._mounts.references(record, table) and not is_expected:
            self._draining.check(record)
            self._draining.end(record, time.monotonic())
            self._warming.forget(record.key)
        else:
            self._mounts.secure(record, time.monotonic() + START_S)

    def _remove_leftovers(self) -> None:
        """Mounts, or only their directories, whose records were lost, as in a reboot."""
        for key in self._mounts.unknown():
            if self._mounts.is_used(key, Table()):
                continue  # unpublish ends that
            try:
                self._mounts.end_key(key, time.monotonic())
            except (AbortedError, OSError) as error:
                log.info("later: %s", error)
