"""The report of files that are fetched ahead of their first read."""

from __future__ import annotations

from typing import Any

import pytest

from fusefs.cli import status_report
from fusefs.cli.warm import together
from fusefs.daemon.jobs.cache_warmer import MOST_NAMED, JobSpec, WarmJob
from fusefs.store.errors import AccessDeniedError
from fusefs.store.interface import ObjectInfo

GIB = 1 << 30
LIMIT = 100 * GIB


def job(**facts: Any) -> dict[str, Any]:
    plain = WarmJob(JobSpec("a"), 0.0).describe(LIMIT)
    return {**plain, "state": "under way", "is_listed": True, **facts}


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            {"bytes": 15 * GIB // 2, "done_bytes": 31 * GIB // 10, "eta_s": 125.0},
            "41%, 3.1 of 7.5 GiB, ETA 2 min",
        ),
        ({"bytes": GIB, "done_bytes": GIB // 2, "eta_s": 0.2}, "50%, 512 MiB of 1.0 GiB, ETA 1 s"),
        ({"bytes": GIB, "done_bytes": 0}, "0%, 0 B of 1.0 GiB"),
        ({"bytes": 2 * GIB, "done_bytes": GIB, "is_listed": False}, "1.0 of at least 2.0 GiB"),
        ({"bytes": 3 * GIB, "left_out_bytes": GIB, "done_bytes": GIB}, "50%, 1.0 of 2.0 GiB"),
        ({}, "100%, 0 of 0 B"),
    ],
)
def test_progress_is_a_share_sizes_and_the_time_left(facts: dict[str, Any], text: str) -> None:
    assert status_report.progress(job(**facts)) == text


def test_several_paths_are_shown_as_one() -> None:
    first = job(bytes=GIB, done_bytes=GIB, state="ended")
    second = job(bytes=3 * GIB, done_bytes=GIB, eta_s=60.0)
    assert status_report.progress(together([first, second])) == "50%, 2.0 of 4.0 GiB, ETA 1 min"
    listing = job(bytes=GIB, is_listed=False)
    assert status_report.progress(together([second, listing])) == "1.0 of at least 4.0 GiB"


def test_files_that_cannot_be_read_are_named_up_to_a_number() -> None:
    one = WarmJob(JobSpec("a"), 0.0)
    for number in range(MOST_NAMED + 3):
        one.fail(f"a/{number}", AccessDeniedError("access denied"))
    report = status_report.warm_progress({**one.describe(LIMIT), "state": "ended"})
    assert "13 files can't be read: a/0 (access denied), a/1 " in report
    assert report.endswith("a/9 (access denied) and 3 more")


def test_the_time_left_follows_from_the_speed_of_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    one = WarmJob(JobSpec("a"), 0.0)
    one.found([ObjectInfo(f"a/{number}", 100, "", 0) for number in range(10)], is_last=False)
    for _ in range(3):
        now += 1
        one.arrived(100, 100)
    assert one.describe(LIMIT)["eta_s"] is None  # there may be more
    one.found([], is_last=True)
    assert one.describe(LIMIT)["eta_s"] == pytest.approx(7)
