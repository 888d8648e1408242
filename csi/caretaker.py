"""What has to be done though nobody calls: after a restart, and now and then.

A driver that was killed leaves mounts that nobody uses, directories of mounts
that are no more, and, where another process held their connections, mounts
that wait for a daemon. All of it shows in the records and in mountinfo.
"""

from __future__ import annotations

import logging
import threading
import time

from csi.binding import Table
from csi.claims import Claims
from csi.draining import Draining
from csi.errors import AbortedError, CsiError
from csi.mount_records import MountRecord
from csi.mounts import Mounts
from csi.warming import Warming
from fusefs.kernel.holder import HolderError

log = logging.getLogger(__name__)

EVERY_S = 5.0
# For a mount that is gone on with.
START_S = 60.0


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

    def run(self) -> None:
        while not self._ending.is_set():
            try:
                self.look_round()
            except Exception:
                log.exception("looking after the mounts failed")
            self._ending.wait(EVERY_S)

    def stop(self) -> None:
        self._ending.set()

    def look_round(self) -> None:
        """See to each mount whose volume has no call under way."""
        for record in self._mounts.records.all():
            if self._ending.is_set():
                return
            try:
                with self._claims.claim(record.volume_id):
                    self._look_after(record)
            except AbortedError:
                pass  # somebody else is at it, or it takes its time
            except (CsiError, OSError, HolderError) as error:
                log.warning("%s: %s", record.source, error)
        self._remove_leftovers()

    def _look_after(self, record: MountRecord) -> None:
        if self._mounts.records.read(record.key) is None:
            return  # ended meanwhile
        table = Table()
        is_expected = self._warming.is_expected(record.key)
        if not self._mounts.references(record, table) and not is_expected:
            self._draining.wait(record, time.monotonic())
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
