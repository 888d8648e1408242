"""`fusefs warm`: daemons fetch files into their caches; this starts the jobs and shows progress."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusefs.cli import status_report, sync
from fusefs.launch import control
from fusefs.launch.control import CommandError
from fusefs.launch.mount_requests import daemon_request

ANSWER_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.02
POLL_S = 0.25
# By then the daemon has mostly found out that a path does not exist.
FIRST_PAGE_S = 3.0
# Lines of progress where standard error is no terminal.
LINE_EVERY_S = 10.0
# Enough for the next daemon, if the daemon dies.
SILENCE_S = 60.0

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

Job = dict[str, Any]
# A mountpoint, and a path relative to it ("" for the whole mount).
Place = tuple[Path, str]


def warm(paths: Sequence[Path]) -> list[Place]:
    """Start a job for each path, and return the paths as mountpoints and paths in them.

    Raises:
        CommandError: a path is in no mount.
        ControlError: a mount has ended, or its daemon refused the job.
    """
    places = [sync.find(path) for path in paths]
    for place in places:
        _command(place, "warm")
    return places


def cancel(paths: Sequence[Path]) -> None:
    """Cancel the jobs of these paths.

    Raises:
        CommandError: a path has no job.
    """
    for path in paths:
        if not _command(sync.find(path), "cancel warming")["was_under_way"]:
            raise CommandError(f"{path} is not being warmed")


def accepted(places: Sequence[Place]) -> None:
    """Wait for up to three seconds until the daemons have begun to list the paths.

    Raises:
        CommandError: a path cannot be warmed.
    """
    deadline = time.monotonic() + FIRST_PAGE_S
    pause_s = FIRST_PAUSE_S
    while True:
        jobs = _jobs(places)
        for place, job in jobs.items():
            if job["why"]:
                raise CommandError(f"{path_of(place)}: {job['why']}")
        is_listing = any(job["state"] == "listing" for job in jobs.values())
        if not is_listing or time.monotonic() > deadline:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)


def wait(places: Sequence[Place]) -> dict[Place, Job]:
    """Wait until all jobs have ended, and return them.

    Raises:
        CommandError: a daemon is silent for a minute.
        ControlError: a mount has ended.
    """
    display = _ProgressDisplay()
    jobs: dict[Place, Job] = {}
    last_answer = time.monotonic()
    pause_s = FIRST_PAUSE_S
    while True:
        open_places = [p for p in places if p not in jobs or not has_ended(jobs[p])]
        if not open_places:
            display.end()
            return {place: jobs[place] for place in places}
        try:
            jobs |= _jobs(open_places)
            last_answer = time.monotonic()
        except control.NotAnsweringError as error:
            if time.monotonic() - last_answer > SILENCE_S:
                raise CommandError(f"the daemon is silent: {error}") from None
        if not all(map(has_ended, jobs.values())):
            display.show(together(list(jobs.values())))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)


def path_of(place: Place) -> Path:
    """The path that a place stands for."""
    mountpoint, below = place
    return mountpoint / below


def is_complete(job: Job) -> bool:
    """Whether a job has ended with all of its files in the cache."""
    return job["state"] == "ended" and not status_report.warming_troubles(job)


def has_ended(job: Job) -> bool:
    """Whether a job is done or was cancelled."""
    return job["state"] in ("ended", "cancelled")


def _command(place: Place, command: str) -> dict[str, Any]:
    mountpoint, below = place
    return daemon_request(mountpoint, {"command": command, "path": below}, ANSWER_TIMEOUT_S)


def _jobs(places: Sequence[Place]) -> dict[Place, Job]:
    """The current state of the jobs."""
    jobs = {}
    for mountpoint in dict.fromkeys(mountpoint for mountpoint, _ in places):
        answer = daemon_request(mountpoint, {"command": "warming"}, ANSWER_TIMEOUT_S)
        known = {job["path"]: job for job in answer["jobs"]}
        for place in places:
            if place[0] == mountpoint:
                # A daemon that was restarted does not know jobs that ended before.
                jobs[place] = known.get(place[1]) or _command(place, "warm")
    return jobs


def together(jobs: list[Job]) -> Job:
    """Several jobs added up to one, for `status_report.progress`."""
    etas = [job["eta_s"] for job in jobs if job["state"] == "under way"]
    eta_s = max((math.inf if eta is None else eta for eta in etas), default=math.inf)
    return {
        **{name: sum(job[name] for job in jobs) for name in ADDED},
        "is_listed": all(job["is_listed"] for job in jobs),
        "eta_s": None if math.isinf(eta_s) else eta_s,
    }


class _ProgressDisplay:
    """Shows progress on standard error: one line of a terminal, or a new line every ten seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last = time.monotonic()
        self._width = 0

    def show(self, job: Job) -> None:
        text = f"{status_report.progress(job)}, {job['done_files']:,} of {job['files']:,} files"
        if self._is_terminal:
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        elif time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)
