"""Volumes that are warmed: fetched into the node's cache before, or while, their pods start.

The mount's daemon does the work (`fusefs warm`); it is asked on its socket, never through
the mount. A pod that is to wait for it is published in several calls: each waits as long as
its caller does, and is then aborted with how far it is; the next goes on. The mount that
nobody has bound yet is kept for them meanwhile. When the volume's time is over, the pod
starts, and the warming goes on.

A mount is warmed once, however many pods use it. Since when, and who waits, is on record
beside the mounts' records, so that a driver that was restarted goes on counting. Times are
of the monotonic clock, which all processes of a boot share.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from csi.errors import AbortedError
from csi.node.mount_record import MountRecord
from csi.volume.options import Warm
from fusefs.api import (
    ControlError,
    Message,
    MountEndedError,
    NotAnsweringError,
    daemon_request,
    describe_duration,
    describe_warming,
)

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 1.0
POLL_S = 0.5
# Kubelet calls again within two minutes; who has not for longer will not.
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class _Record:
    """`began` is when the first publish came, `waiting` when each target's last one did."""

    began: float
    is_over: bool = False
    waiting: dict[str, float] = field(default_factory=dict)


class Warming:
    """The warmings of the driver's mounts, on record below a directory. For any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def begin(self, record: MountRecord, warm: Warm) -> None:
        """Have a mount warmed that is served already, if it has not been; answers at once."""
        if warm.paths and self._read(record.key) is None:
            self._write(record.key, _Record(time.monotonic(), is_over=True))
            try:
                _jobs(record, warm)
            except ControlError as error:
                log.warning("%s is not warmed: %s", record.source, error)

    def is_awaited(self, record: MountRecord, warm: Warm) -> bool:
        """Whether a pod is to wait for a mount's warming before it starts."""
        if not warm.is_first:
            return False
        known = self._read(record.key)
        return known is None or not known.is_over

    def wait(self, record: MountRecord, warm: Warm, target: Path, ends: float) -> None:
        """Return when a mount is warm, or has had its time. `ends` is monotonic.

        Raises:
            AbortedError: it is not yet at `ends`; it says how far it is.
        """
        began = self._note(record.key, target)
        said = "the mount is asked"
        while True:
            try:
                jobs = _jobs(record, warm)
                said = describe_warming(jobs)
                if all(job["state"] in ("ended", "cancelled") for job in jobs):
                    break
            except (NotAnsweringError, MountEndedError) as error:
                said = f"the mount does not tell how far it is: {error}"
            except ControlError as error:
                said = str(error)
                break
            now = time.monotonic()
            if now - began >= warm.timeout_s:
                waited = describe_duration(warm.timeout_s)
                said = f"not done in {waited}, it goes on: {said}"
                break
            if now + POLL_S > ends:
                self._note(record.key, target)
                raise AbortedError(f"warming {said}")
            time.sleep(POLL_S)
        log.info("warming %s for %s: %s", record.source, record.volume_id, said)
        self._change(record.key, lambda known: replace(known, is_over=True))

    def is_expected(self, key: str) -> bool:
        """Whether a mount that nobody has bound is waited for."""
        known = self._read(key)
        since = max(known.waiting.values(), default=0.0) if known is not None else 0.0
        return bool(since) and time.monotonic() - since < PATIENCE_S

    def is_not_waited_for(self, key: str, target: Path) -> None:
        """A mount is bound to this target, or will not be."""
        if self._read(key) is not None:
            self._change(key, lambda known: _without(known, target))

    def forget(self, key: str) -> None:
        """A mount has ended."""
        self._path(key).unlink(missing_ok=True)

    def _note(self, key: str, target: Path) -> float:
        """Note that a target's publish waits; return when the first one of all began."""
        now = time.monotonic()

        def add(known: _Record) -> _Record:
            return replace(known, waiting={**known.waiting, str(target): now})

        return self._change(key, add).began

    def _change(self, key: str, change: Callable[[_Record], _Record]) -> _Record:
        with self._lock:
            record = change(self._read(key) or _Record(time.monotonic()))
            self._write(key, record)
            return record

    def _write(self, key: str, record: _Record) -> None:
        unfinished = self._path(key).with_suffix(".new")
        unfinished.write_text(json.dumps(asdict(record)))
        unfinished.replace(self._path(key))

    def _read(self, key: str) -> _Record | None:
        try:
            return _Record(**json.loads(self._path(key).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.json"


def _without(known: _Record, target: Path) -> _Record:
    waiting = {path: since for path, since in known.waiting.items() if path != str(target)}
    return replace(known, waiting=waiting)


def _jobs(record: MountRecord, warm: Warm) -> list[Message]:
    """How far the daemon of a mount is; it begins with what it does not know of.

    Raises:
        ControlError: it does not answer, or can't do it.
    """
    root = Path(record.root)
    answer = daemon_request(root, {"command": "warming"}, ANSWER_TIMEOUT_S)
    jobs = {job["path"]: job for job in answer["jobs"]}
    return [
        jobs.get(path) or daemon_request(root, {"command": "warm", "path": path}, ANSWER_TIMEOUT_S)
        for path in warm.paths
    ]
