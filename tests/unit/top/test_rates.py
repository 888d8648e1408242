"""`fusefs top` without mounts: rates of two answers, and how they look."""

from pathlib import Path
from typing import Any

import pytest

from fusefs.exporter.queries import MountAnswer, Target
from fusefs.top import lines, main
from fusefs.top.rates import Rates, rates

TARGET = Target("/data", Path("/nonexistent"))


def counter(value: float, **labels: str) -> dict[str, Any]:
    return {"labels": labels, "value": value}


def answer(taken: float, cached: float, s3: float, stalled: float, requests: int) -> MountAnswer:
    """A daemon's answer with these counters."""
    metrics = {
        "volume_info": [counter(1, source="s3://bucket/")],
        "read_bytes_total": [counter(cached, source="cache"), counter(s3, source="s3")],
        "stalled_seconds_total": [
            counter(stalled, cause="any"),
            counter(stalled / 2, cause="s3_first_byte"),
            counter(0, cause="cache_disk"),
        ],
        "s3_requests_total": [
            counter(requests, operation="get", code="200"),
            counter(requests, operation="get", code="500"),
            counter(3 * requests, operation="get", code="503"),
        ],
        "s3_throttled_total": [counter(3 * requests)],
        "prefetch_bytes_total": [counter(300, outcome="used"), counter(100, outcome="wasted")],
        "upload_pending_files": [counter(2)],
        "upload_pending_bytes": [counter(2048)],
        "upload_oldest_pending_seconds": [counter(7)],
        "plan_ahead_files": [counter(412)],
        "plan_ahead_bytes": [counter(1 << 30)],
        "plan_ahead_seconds": [counter(14)],
        "plan_late_seconds": [counter(75)],
        "plan_opens_total": [
            counter(99 * requests, outcome="in_time"),
            counter(requests, outcome="rate"),
            counter(0, outcome="room"),
        ],
    }
    plain: dict[str, Any] = {
        name: {"type": "counter", "help": "", "samples": samples}
        for name, samples in metrics.items()
    }
    plain["request_duration_seconds"] = {
        "type": "histogram",
        "help": "",
        "samples": [
            {
                "labels": {"operation": "read"},
                "buckets": [["0.003", requests / 2], ["0.03", requests], ["+Inf", requests]],
                "sum": requests / 100,
                "count": requests,
            }
        ],
    }
    return MountAnswer(TARGET, plain, taken=taken)


def test_rates_are_what_happened_in_between() -> None:
    found = rates(answer(10, 1000, 0, 3, 50), answer(12, 7000, 2000, 4, 70))
    assert (found.read_s, found.read_from) == (4000, {"cache": 3000, "s3": 1000})
    assert found.stalled == {"any": 0.5, "s3_first_byte": 0.25, "cache_disk": 0}
    assert (found.s3_errors_s, found.s3_throttled_s) == (10, 30)
    assert found.wasted_share == 0.25
    assert found.requests["read"].per_s == 10
    assert found.requests["read"].mean_s == pytest.approx(0.01)
    assert found.requests["read"].within_s == 0.03
    assert found.source == "s3://bucket/"


def test_a_block_has_the_times_of_operations_and_what_may_be_changed() -> None:
    found = rates(answer(10, 1000, 0, 3, 50), answer(12, 2000, 7000, 4, 70))
    block = lines.block(found)
    assert "  read 3.9 KiB/s (12% cache, 88% S3)" in block
    assert "  read 10.0/s, 10.0 ms on average, 99% within 30.0 ms" in block
    assert len(lines.advice(found)) == 2
    assert "fusefs warm" in lines.advice(found)[0]


def test_the_first_answer_has_no_rates_and_a_silent_mount_a_reason() -> None:
    assert rates(None, answer(10, 10_000, 0, 3, 50)).read_s == 0
    silent = rates(answer(1, 0, 0, 0, 0), MountAnswer(TARGET, None, "no answer"))
    assert lines.line(silent) == "/data: does not answer (no answer)"
    # The counters of the next daemon begin at zero.
    assert rates(answer(10, 10_000, 0, 3, 50), answer(12, 500, 0, 0, 0)).read_s == 250


@pytest.fixture
def busy() -> Rates:
    return rates(answer(10, 0, 0, 0, 0), answer(11, 3 << 20, 1 << 20, 0.4, 10))


def malformed(metrics: Any) -> MountAnswer:
    return MountAnswer(Target("/broken", Path("/nonexistent")), metrics, taken=11)


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        {"cache_bytes": None},
        {"cache_bytes": {"type": "gauge"}},
        {"cache_bytes": {"type": "gauge", "samples": [{"labels": {}, "value": "many"}]}},
        {"cache_bytes": {"type": "gauge", "samples": [{"labels": {}, "value": float("nan")}]}},
        {"volume_info": {"type": "gauge", "samples": [{"labels": ["source"], "value": 1}]}},
        {"read_bytes_total": {"type": "histogram", "samples": [{"labels": {}, "value": 1}]}},
    ],
)
def test_metrics_that_cannot_be_read_concern_their_mount_alone(
    metrics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [answer(10, 0, 0, 0, 0), malformed(metrics)]
    answers = iter([first, [answer(12, 4000, 0, 0, 0), malformed(metrics)]])
    monkeypatch.setattr(main, "mounts_of_user", list)
    monkeypatch.setattr(main, "query_all", lambda _targets: next(answers))
    sampler = main.Sampler()
    sampler.sample()
    well, broken = sampler.sample()
    assert well.read_s == 2000
    assert lines.line(broken).startswith("/broken: its metrics can't be read (")
    text = main.screen([well, broken], 160, 40)
    assert "/data" in text
    assert "its metrics can't be read" in text


def test_a_mount_goes_on_from_its_last_answer_that_could_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unreadable = MountAnswer(TARGET, {"cache_bytes": None}, taken=11)
    silent = MountAnswer(TARGET, None, "no answer", taken=12)
    answers = iter([[answer(10, 0, 0, 0, 0)], [unreadable], [silent], [answer(14, 4000, 0, 0, 0)]])
    monkeypatch.setattr(main, "mounts_of_user", list)
    monkeypatch.setattr(main, "query_all", lambda _targets: next(answers))
    sampler = main.Sampler()
    found = [sampler.sample()[0] for _ in range(4)]
    assert [mount.is_up for mount in found] == [True, False, False, True]
    assert (found[-1].interval_s, found[-1].read_s) == (4, 1000)


def test_a_line_has_rates_causes_and_what_waits(busy: Rates) -> None:
    text = lines.line(busy)
    assert text.startswith("/data: read 4.0 MiB/s (75% cache, 25% S3)")
    assert "programs waited 40% of the time: 20% for S3's first byte" in text
    assert "2 files (2.0 KiB) to upload, the oldest for 7 s" in text
    assert "fetched ahead and not read 25%" in text
    assert "plan 412 files (1.0 GiB, 14 s) ahead, no open in time for 1 min 15 s, 99% of" in text
    assert text.endswith("opens in time, late for rate")


def test_a_screen_has_a_block_for_each_mount_and_lines_where_blocks_have_no_room(
    busy: Rates,
) -> None:
    text = main.screen([busy, Rates("/dead", why="no answer")], 60, 20).splitlines()
    assert text[0] == "/data  s3://bucket/"
    assert "  programs waited 40% of the time: 20% for S3's first byte" in text
    assert text[-1] == "  does not answer (no answer)"
    text = main.screen([busy] * 100, 60, 24).splitlines()
    assert len(text) == 24
    assert text[0].startswith("/data: read 4.0 MiB/s (75% cache")
    assert text[-1] == "and 77 more"
    assert max(map(len, text)) == 60


@pytest.mark.parametrize("terminal", ["dumb", ""])
def test_a_terminal_without_a_cursor_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: str
) -> None:
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(main, "mounts_of_user", list)
    assert main.run(is_plain=False, is_json=False, count=1) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["no mounts"]
