"""`fusefs warm` and `fusefs pin`: daemons fetch files into their caches.

This module starts the daemons' jobs and shows their progress.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusefs.cli import manifest, polling, status_report, sync
from fusefs.cli.polling import ANSWER_TIMEOUT_S, FIRST_PAUSE_S, POLL_S, SILENCE_S
from fusefs.launch import control
from fusefs.launch.control import CommandError
from fusefs.launch.mount_requests import daemon_request

# The longest wait for the first page of a listing, which shows if a path does not exist.
FIRST_PAGE_S = 3.0
# Time between lines of progress if standard error is not a terminal.
LINE_EVERY_S = 10.0

ADDED = (
    "files",
    "bytes",
    "done_files",
    "done_bytes",
    "fetched_bytes",
    "left_out_files",
    "left_out_bytes",
    "failed_files",
)

# The variable with a pod's number in a Kubernetes Indexed Job.
JOB_INDEX = "JOB_COMPLETION_INDEX"

Job = dict[str, Any]
# If one mount has more paths than this, they are sent as a list.
MANY = 64
BAD_LINES_NAMED = 10


@dataclass(frozen=True, slots=True)
class WarmRequest:
    """A request for a job of one mount's daemon.

    `below` is a path or pattern relative to the mountpoint ("" for the whole mount). With
    `list_name` the paths of the list of this name are fetched, and `below` is the list's title for
    users. If `shard` (number, count) is given, only this part of the selected files is fetched. All
    selected files are pinned if `is_pinned`.
    """

    mountpoint: Path
    below: str
    shard: tuple[int, int] | None = None
    is_pinned: bool = False
    list_name: str = ""

    @property
    def title(self) -> str:
        path = self.below if self.list_name else str(self.mountpoint / self.below)
        return f"{path} (shard {self.shard[0]}/{self.shard[1]})" if self.shard else path

    @property
    def message(self) -> dict[str, Any]:
        return {
            "command": "warm",
            "path": self.below,
            "shard": self.shard,
            "pin": self.is_pinned,
            "list": self.list_name,
        }


# The ids of the daemons' jobs, by request.
Ids = dict[WarmRequest, str]


def shard(text: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """Parse `I/N`, or `N` in a pod of an Indexed Job, into the number and the count of shards.

    Kubernetes sets JOB_COMPLETION_INDEX to I in such a pod
    (https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode).

    Raises:
        ValueError: `text` is invalid; the message says why.
    """
    parts = text.split("/")
    if len(parts) == 1:
        index = environment.get(JOB_INDEX)
        if index is None:
            raise ValueError(f"{text!r} has no number, and there is no ${JOB_INDEX}; write I/N")
        parts = [index, *parts]
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{'/'.join(parts)!r} is not of the form I/N, as in 0/8")
    number, count = map(int, parts)
    if number >= count:
        raise ValueError(f"the shards of {'/'.join(parts)!r} are numbered from 0 to N-1")
    return number, count


def requests(
    paths: Sequence[Path], shard: tuple[int, int] | None = None, *, is_pinned: bool = False
) -> list[WarmRequest]:
    """Make requests for these paths; many paths of one mount are sent as a list for one request."""
    of: dict[Path, list[str]] = {}
    for path in paths:
        mountpoint, below = sync.find(path)
        of.setdefault(mountpoint, []).append(below)
    found = []
    for mountpoint, parts in of.items():
        # A line of a list cannot name the whole mount.
        if len(parts) > MANY and all(map(manifest.has_line, parts)):
            title = f"{len(parts):,} paths of {mountpoint}"
            name = manifest.send(mountpoint, parts)
            found.append(WarmRequest(mountpoint, title, shard, is_pinned, name))
        else:
            found += [
                WarmRequest(mountpoint, part, shard, is_pinned) for part in dict.fromkeys(parts)
            ]
    return found


def manifest_request(
    file: str, base: Path, shard: tuple[int, int] | None, complain: Callable[[str], None]
) -> tuple[WarmRequest, int]:
    """Send the daemon a manifest's paths; return a request to warm them and the count of bad lines.

    `file` may be "-" (standard input); relative paths are below `base`. The request, which is not
    sent, is for `shard` (I, N) of the paths. `complain` gets messages about the first bad lines.
    """
    mountpoint, below = sync.find(base)
    bad = 0

    def refuse(number: int, why: str) -> None:
        nonlocal bad
        bad += 1
        if bad <= BAD_LINES_NAMED:
            complain(f"{file}:{number}: {why}")

    with sys.stdin.buffer if file == "-" else open(file, "rb") as lines:
        name = manifest.send(mountpoint, manifest.Manifest(mountpoint, below).paths(lines, refuse))
    if bad > BAD_LINES_NAMED:
        complain(f"{file}: and {bad - BAD_LINES_NAMED:,} more lines that name nothing of the mount")
    title = "standard input" if file == "-" else file
    return WarmRequest(mountpoint, title, shard, list_name=name), bad


def start(requests: Sequence[WarmRequest]) -> Ids:
    """Start jobs, unless equal jobs are under way, and return their ids; may raise ControlError."""
    return {request: _start(request)["id"] for request in requests}


def _start(request: WarmRequest) -> Job:
    return daemon_request(request.mountpoint, request.message, ANSWER_TIMEOUT_S)


def cancel(paths: Sequence[Path]) -> None:
    """Cancel the jobs at and below these paths; raise CommandError for a path without jobs."""
    for path in paths:
        mountpoint, below = sync.find(path)
        message = {"command": "cancel warming", "path": below}
        if not daemon_request(mountpoint, message, ANSWER_TIMEOUT_S)["was_under_way"]:
            raise CommandError(f"{path} is not being warmed")


def accepted(ids: Ids) -> None:
    """Wait up to 3 s until each job has found its first files; CommandError if a job has failed."""
    deadline = time.monotonic() + FIRST_PAGE_S
    pause_s = FIRST_PAUSE_S
    while True:
        jobs = _jobs(ids)
        for request, job in jobs.items():
            if job["why"]:
                raise CommandError(f"{request.title}: {job['why']}")
        is_listing = any(job["state"] == "listing" for job in jobs.values())
        if not is_listing or time.monotonic() > deadline:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)


def wait(ids: Ids) -> dict[WarmRequest, Job]:
    """Wait until all jobs have ended, and return their last states.

    Raises CommandError if a daemon is silent for a minute, or does not know the job of a list
    because the daemon was replaced after the job's end.
    """
    jobs: dict[WarmRequest, Job] = {}
    began = last_answer = shown_at = time.monotonic()
    while True:
        remaining = {
            request: job_id
            for request, job_id in ids.items()
            if request not in jobs or not has_ended(jobs[request])
        }
        if not remaining:
            polling.show_line("")
            return {request: jobs[request] for request in ids}
        try:
            jobs |= _jobs(remaining)
            last_answer = time.monotonic()
        except control.NotAnsweringError as error:
            if time.monotonic() - last_answer > SILENCE_S:
                raise CommandError(str(error)) from None
        if not all(map(has_ended, jobs.values())):
            shown_at = _show(together(list(jobs.values())), shown_at)
        # A fiftieth of the time so far: the end of the jobs is noticed at most this much later.
        time.sleep(min(max(FIRST_PAUSE_S, (time.monotonic() - began) / 50), POLL_S))


def is_complete(job: Job) -> bool:
    """True if a job has ended and all of its files are in the cache."""
    return job["state"] == "ended" and not status_report.warming_troubles(job)


def has_ended(job: Job) -> bool:
    return job["state"] in ("ended", "cancelled")


def _jobs(ids: Ids) -> dict[WarmRequest, Job]:
    jobs = {}
    for mountpoint in dict.fromkeys(request.mountpoint for request in ids):
        answer = daemon_request(mountpoint, {"command": "warming"}, ANSWER_TIMEOUT_S)
        known = {job["id"]: job for job in answer["jobs"]}
        for request, job_id in ids.items():
            if request.mountpoint == mountpoint:
                jobs[request] = known.get(job_id) or _again(request)
    return jobs


def _again(request: WarmRequest) -> Job:
    """Start a job anew that a new daemon does not know; raise CommandError for a job of a list."""
    if request.list_name:
        raise CommandError(
            f"{request.title}: the daemon was replaced after the job had ended; run the command"
            " again to see what is in the cache"
        )
    return _start(request)


def together(jobs: list[Job]) -> Job:
    """Return the sums of several jobs, in the form of one job for `status_report.progress`."""
    etas = [job["eta_s"] for job in jobs if job["state"] == "under way"]
    eta_s = max((math.inf if eta is None else eta for eta in etas), default=math.inf)
    return {
        **{name: sum(job[name] for job in jobs) for name in ADDED},
        "is_listed": all(job["is_listed"] for job in jobs),
        "eta_s": None if math.isinf(eta_s) else eta_s,
    }


def _show(job: Job, shown_at: float) -> float:
    """Show progress, without a terminal every 10 s; return the last line's time as `shown_at`."""
    text = f"{status_report.progress(job)}, {job['done_files']:,} of {job['files']:,} files"
    polling.show_line(text)
    if sys.stderr.isatty() or time.monotonic() - shown_at < LINE_EVERY_S:
        return shown_at
    print(text, file=sys.stderr, flush=True)
    return time.monotonic()
