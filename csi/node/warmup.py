"""Warms volumes: fetches them into the node's cache before, or while, their pods start.

The mount's daemon does the work on request, as for `fusefs warm`. Only the driver can use the
daemon's socket, so a pod's author names the paths to fetch in the volume's attributes. A pod that
waits for warming is published in several calls: each call waits until its deadline and then ends
with ABORTED and the progress; the next call continues. Meanwhile the mount stays without a bound
target. When `warmTimeout` is over, the pod starts and the warming continues.

A mount is warmed only once, however many pods use it; if each pod fetches its own part
(`warmShards`), each part is fetched once. Start times and waiting targets are on record beside the
mounts' records, for a restarted driver. All times are of the monotonic clock, which is the same for
all processes until the next reboot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from csi.errors import AbortedError
from csi.node.mount_record import MountRecord
from csi.node.record_files import RecordFiles
from csi.volume.options import WarmOption
from fusefs.cli import status_report
from fusefs.cli import warm as warm_jobs
from fusefs.launch.control import MALFORMED, ControlError, Message, NotAnsweringError
from fusefs.launch.mount_requests import MountEndedError, daemon_request
from fusefs.settings.display import human_duration

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 1.0
POLL_S = 0.5
# A target counts as waiting for this long: kubelet calls again within two minutes, or gives up.
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class _Record:
    """A warm-up's record: times of its first call and of each waiting target's last call.

    With `is_over` no pod has to wait.
    """

    began: float
    is_over: bool = False
    waiting: dict[str, float] = field(default_factory=dict)


class Warmups:
    """The warm-ups of the driver's mounts, with records below `directory`. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._files = RecordFiles(directory, _Record)
        self._lock = threading.Lock()

    def begin(self, record: MountRecord, warm: WarmOption, *, is_new: bool) -> None:
        """Start a mount's warm-up if the mount `is_new` or none is on record; do not wait for it.

        A failure is only logged, because the volume is published already; the next pod tries again.
        """
        name = _name(record.key, warm)
        if warm.paths and (is_new or self._files.read(name) is None):
            try:
                _jobs(record, warm)
                self._change(name, lambda known: replace(known, is_over=True))
            except (ControlError, OSError, *MALFORMED) as error:
                log.warning("the warm-up of %s has no job or record: %s", record.source, error)

    def blocks_publish(self, record: MountRecord, warm: WarmOption) -> bool:
        """True if a pod has to wait for the warm-up before it starts."""
        if not warm.is_first:
            return False
        known = self._files.read(_name(record.key, warm))
        return known is None or not known.is_over

    def add_waiter(self, key: str, warm: WarmOption, target: Path) -> float:
        """Record that a target waits; return the time at which the warm-up's first call began.

        The time is in seconds of the monotonic clock. Raises OSError if the record cannot be
        written.
        """
        now = time.monotonic()

        def add(known: _Record) -> _Record:
            return replace(known, waiting={**known.waiting, str(target): now})

        return self._change(_name(key, warm), add).began

    def wait(self, record: MountRecord, warm: WarmOption, target: Path, ends: float) -> None:
        """Wait until the mount is warm, warming has failed or `warmTimeout` has passed.

        Raises:
            AbortedError: the warm-up still runs at `ends` (monotonic clock); says the progress.
        """
        began = self.add_waiter(record.key, warm, target)
        status = "is starting"
        while True:
            try:
                jobs = _jobs(record, warm)
                status = _describe(jobs)
                if all(map(warm_jobs.has_ended, jobs)):
                    break
            except (NotAnsweringError, MountEndedError) as error:
                status = f"the mount does not report its progress: {error}"
            except ControlError as error:
                status = str(error)
                break
            except MALFORMED:  # from a hostile daemon, or one of another version
                status = "the mount reports no progress"
                break
            now = time.monotonic()
            if now - began >= warm.timeout_s:
                waited = human_duration(warm.timeout_s)
                status = f"not done in {waited}, goes on in the background: {status}"
                break
            if now + POLL_S > ends:
                self.add_waiter(record.key, warm, target)
                raise AbortedError(f"warming {status}")
            time.sleep(POLL_S)
        log.info("warming %s for %s: %s", record.source, record.volume_id, status)
        self._change(_name(record.key, warm), lambda known: replace(known, is_over=True))

    def is_awaited(self, key: str) -> bool:
        """True if a target lately waited for the warm-up (`PATIENCE_S`): the mount must not end."""
        records = filter(None, map(self._files.read, self._names(key)))
        since = max((when for record in records for when in record.waiting.values()), default=0.0)
        return bool(since) and time.monotonic() - since < PATIENCE_S

    def remove_waiter(self, key: str, target: Path) -> None:
        """Remove a target from the records: the mount is bound to it, or the pod is gone.

        If the record cannot be written, the target counts as waiting for `PATIENCE_S`.
        """
        for name in self._names(key):
            known = self._files.read(name)
            if known is None or str(target) not in known.waiting:
                continue

            def without(known: _Record) -> _Record:
                others = {path: at for path, at in known.waiting.items() if path != str(target)}
                return replace(known, waiting=others)

            try:
                self._change(name, without)
            except OSError as error:
                log.warning("%s stays on record as waiting: %s", target, error)

    def forget(self, key: str) -> None:
        """Remove the warm-up records of a mount that has ended."""
        for name in self._names(key):
            self._files.remove(name)

    def _change(self, name: str, change: Callable[[_Record], _Record]) -> _Record:
        with self._lock:
            record = change(self._files.read(name) or _Record(time.monotonic()))
            self._files.write(name, record)
            return record

    def _names(self, key: str) -> list[str]:
        """Return the names of a mount's records, of the whole warm-up and of its parts."""
        return [name for name in self._files.names() if name.partition(".")[0] == key]


def _name(key: str, warm: WarmOption) -> str:
    """Return the name of the record for the warm-up of a mount, or of one part of it."""
    return key if warm.part is None else f"{key}.{warm.part}"


def _describe(jobs: list[Message]) -> str:
    """Return a text about the progress of warming jobs, or about their results."""
    if all(map(warm_jobs.has_ended, jobs)):
        return "; ".join(
            f"{job['path'] or '.'}: {status_report.warm_progress(job)}" for job in jobs
        )
    return status_report.progress(warm_jobs.together(jobs))


def _jobs(record: MountRecord, warm: WarmOption) -> list[Message]:
    """Return a mount's warming jobs, one for each path of `warm`; start those that are missing."""
    root = Path(record.root)
    answer = daemon_request(root, {"command": "warming"}, ANSWER_TIMEOUT_S)
    jobs = {job.get("id", job["path"]): job for job in answer["jobs"]}
    return [
        jobs.get(job_id(path, warm)) or daemon_request(root, _request(path, warm), ANSWER_TIMEOUT_S)
        for path in warm.paths
    ]


def job_id(path: str, warm: WarmOption) -> str:
    """Return the id that the daemon gives the warming of a path (JobSpec.id in daemon/jobs)."""
    return path if warm.part is None else f"{path}\0shard {warm.part}/{warm.shards}"


def _request(path: str, warm: WarmOption) -> Message:
    request: Message = {"command": "warm", "path": path}
    return request if warm.part is None else {**request, "shard": [warm.part, warm.shards]}
