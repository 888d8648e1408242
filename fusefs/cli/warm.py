"""How `fusefs warm` asks daemons to fetch files, and watches them do it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusefs.cli import status_report, sync
from fusefs.launch import control, registry
from fusefs.launch.control import CommandError

ANSWER_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.02
ASK_EVERY_S = 0.25
# A path that isn't there is mostly known as soon.
FIRST_PAGE_S = 3.0
# Where there is no terminal.
LINE_EVERY_S = 10.0
# For the next daemon, if one dies.
SILENCE_S = 60.0

ADDED = (
    "files", "bytes", "done_files", "done_bytes", "fetched_bytes", "left_out_files",
    "left_out_bytes", "failed_files",
)  # fmt: skip

Job = dict[str, Any]
# A mountpoint, and what is below its root.
Place = tuple[Path, str]


def warm(paths: Sequence[Path]) -> list[Place]:
    """Have daemons fetch everything at and below these paths; return what was asked of whom.

    Raises:
        CommandError: a path is in no mount.
        ControlError: a daemon did not accept it.
    """
    places = [sync.find(path) for path in paths]
    for place in places:
        _ask(place, "warm")
    return places


def cancel(paths: Sequence[Path]) -> None:
    """Have daemons fetch no more of these paths.

    Raises:
        CommandError: nothing at or below one of them is being warmed.
    """
    for path in paths:
        if not _ask(sync.find(path), "cancel warming")["was_under_way"]:
            raise CommandError(f"{path} is not being warmed")


def accepted(places: Sequence[Place]) -> None:
    """Wait until the daemons have had time to see what is there.

    Raises:
        CommandError: a path can't be warmed.
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
        pause_s = min(2 * pause_s, ASK_EVERY_S)


def wait(places: Sequence[Place]) -> dict[Place, Job]:
    """Wait until everything has been fetched that can be, and return how it went.

    Raises:
        CommandError: a mount has ended, or is silent for too long.
    """
    shown = _Shown()
    jobs: dict[Place, Job] = {}
    heard = time.monotonic()
    pause_s = FIRST_PAUSE_S
    while True:
        left = [place for place in places if place not in jobs or not has_ended(jobs[place])]
        if not left:
            shown.end()
            return {place: jobs[place] for place in places}
        try:
            jobs |= _jobs(left)
            heard = time.monotonic()
        except control.NotAnsweringError as error:
            if time.monotonic() - heard > SILENCE_S:
                raise CommandError(f"its daemon is silent: {error}") from None
        if not all(map(has_ended, jobs.values())):
            shown.show(together(list(jobs.values())))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, ASK_EVERY_S)


def path_of(place: Place) -> Path:
    mountpoint, below = place
    return mountpoint / below


def is_warm(job: Job) -> bool:
    """Whether a job that has ended has brought everything into the cache."""
    return job["state"] == "ended" and not status_report.warming_troubles(job)


def has_ended(job: Job) -> bool:
    return job["state"] in ("ended", "cancelled")


def _ask(place: Place, command: str) -> dict[str, Any]:
    mountpoint, below = place
    return control.exchange(
        _socket(mountpoint), {"command": command, "path": below}, ANSWER_TIMEOUT_S
    )


def _socket(mountpoint: Path) -> Path:
    registration = registry.registration_of(mountpoint)
    if registration is None:
        raise CommandError(f"the mount at {mountpoint} has ended")
    return registration.socket


def _jobs(places: Sequence[Place]) -> dict[Place, Job]:
    """How far the jobs are, by place."""
    found = {}
    for mountpoint in dict.fromkeys(mountpoint for mountpoint, _ in places):
        answer = control.exchange(_socket(mountpoint), {"command": "warming"}, ANSWER_TIMEOUT_S)
        told = {job["path"]: job for job in answer["jobs"]}
        for place in places:
            if place[0] == mountpoint:
                # One that is not known has ended before its daemon did.
                found[place] = told.get(place[1]) or _ask(place, "warm")
    return found


def together(jobs: list[Job]) -> Job:
    """Several jobs as one, for `report.progress`."""
    etas = [job["eta_s"] for job in jobs if job["state"] == "under way"]
    eta_s = max((math.inf if one is None else one for one in etas), default=math.inf)
    return {
        **{name: sum(job[name] for job in jobs) for name in ADDED},
        "is_listed": all(job["is_listed"] for job in jobs),
        "eta_s": None if math.isinf(eta_s) else eta_s,
    }


class _Shown:
    """Progress on standard error: one line of a terminal, or now and then a line of its own."""

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
