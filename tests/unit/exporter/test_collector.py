"""The exporter: many mounts, some of which do not answer."""

import argparse
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fusefs.exporter import main, queries
from fusefs.exporter.collector import MOST_SAMPLES, MountCollector, registry_of
from fusefs.exporter.queries import MountAnswer, Target
from fusefs.launch.control import CommandError

ANSWER: dict[str, Any] = {
    "metrics": {
        "cache_bytes": {"type": "gauge", "help": "Bytes.", "samples": [{"labels": {}, "value": 7}]},
        "opens_total": {
            "type": "counter",
            "help": "Opens.",
            "samples": [{"labels": {"mode": "served"}, "value": 3}],
        },
        "s3_first_byte_seconds": {
            "type": "histogram",
            "help": "Times.",
            "samples": [
                {
                    "labels": {"operation": "GET", "code": "206"},
                    "buckets": [["0.1", 2], ["+Inf", 3]],
                    "sum": 0.5,
                    "count": 3,
                }
            ],
        },
    }
}

Serve = Callable[..., Target]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a daemon's stand-in: it answers each request with these bytes; None is silence.

    With a barrier it answers when others have come there.
    """
    sockets: list[socket.socket] = []

    def start(name: str, answer: bytes | None, barrier: threading.Barrier | None = None) -> Target:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(tmp_path / name))
        listening.listen()
        sockets.append(listening)

        def run() -> None:
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                sockets.append(client)
                if answer is not None:
                    with client:
                        client.recv(1 << 16)
                        if barrier is not None:
                            barrier.wait(30)
                        client.sendall(answer)

        threading.Thread(target=run, daemon=True).start()
        return Target(name, tmp_path / name)

    yield start
    for one in sockets:
        one.close()


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    """The samples of a scrape, by their text."""
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_a_mount_that_hangs_is_down_and_the_others_are_up(serve: Serve, tmp_path: Path) -> None:
    targets = [
        serve("silent", None),
        serve("good", json.dumps(ANSWER).encode() + b"\n"),
        serve("old", b'{"error": "no such command"}\n'),
        Target("gone", tmp_path / "gone"),
    ]
    answers = queries.query_all(targets, 0.5)
    found = scraped(registry_of(MountCollector(lambda: targets, lambda _targets: answers)))
    names = ("silent", "good", "old", "gone")
    ups = [found[f'fusefs_volume_up{{volume="{name}"}}'] for name in names]
    assert ups == [0, 1, 1, 0]
    assert found['fusefs_cache_bytes{volume="good"}'] == 7
    assert [bool(answer.why) for answer in answers] == [True, False, True, True]


def test_mounts_answer_side_by_side(serve: Serve) -> None:
    line = json.dumps(ANSWER).encode() + b"\n"
    all_requested = threading.Barrier(4)  # each answers once all have been sent their request
    targets = [serve(f"mount{number}", line, all_requested) for number in range(4)]
    assert all(answer.metrics and not answer.why for answer in queries.query_all(targets, 30))


def test_mounts_answer_where_the_system_starts_no_more_threads(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps(ANSWER).encode() + b"\n"
    targets = [serve(f"mount{number}", line) for number in range(4)]
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    assert all(answer.metrics for answer in queries.query_all(targets, 30))


def test_mounts_whose_names_differ_in_bytes_that_are_not_utf8_are_two_volumes() -> None:
    targets = [Target("/mnt/\udcfe", Path()), Target("/mnt/\udcff", Path())]
    collector = MountCollector(
        lambda: targets, lambda _: [MountAnswer(target, {}) for target in targets]
    )
    text = generate_latest(registry_of(collector)).decode()
    up = [line for line in text.splitlines() if line.startswith("fusefs_volume_up{")]
    assert len(set(up)) == 2


def test_all_kinds_are_exported_with_the_volume() -> None:
    target = Target("/mnt/\udcff", Path(), (("team", "trainer-0"),))
    collector = MountCollector(lambda: [target], lambda _: [MountAnswer(target, ANSWER["metrics"])])
    found = scraped(registry_of(collector))
    volume = r'volume="/mnt/\\xff"'
    assert found[f'fusefs_opens_total{{mode="served",{volume}}}'] == 3
    pod = f'fusefs_volume_pod_info{{namespace="team",pod="trainer-0",{volume}}}'
    assert found[pod] == 1
    labels = f'code="206",operation="GET",{volume}'
    assert (
        found[
            f'fusefs_s3_first_byte_seconds_bucket{{code="206",le="0.1",operation="GET",{volume}}}'
        ]
        == 2
    )
    assert found[f"fusefs_s3_first_byte_seconds_count{{{labels}}}"] == 3


def test_mounts_share_one_family_for_each_name() -> None:
    targets = [Target("a", Path()), Target("b", Path())]
    answers = [MountAnswer(target, ANSWER["metrics"]) for target in targets]
    text = generate_latest(registry_of(MountCollector(lambda: targets, lambda _: answers))).decode()
    assert text.count("# TYPE fusefs_cache_bytes gauge") == 1


GAUGE: dict[str, Any] = ANSWER["metrics"]["cache_bytes"]


@pytest.mark.parametrize(
    "malformed",
    [
        ["cache_bytes"],
        {"cache_bytes": None},
        {"cache_bytes": {**GAUGE, "samples": [{"labels": {}, "value": None}]}},
        {"cache_bytes": {**GAUGE, "samples": [{"value": 1}]}},
        {"cache_bytes": {**GAUGE, "samples": [{"labels": {'a="b",c': "d"}, "value": 1}]}},
        {"cache_bytes": {**GAUGE, "samples": [{"labels": {"a": 1}, "value": 1}]}},
        {"cache_bytes": {**GAUGE, "samples": [{"labels": {"__name__": "up"}, "value": 1}]}},
        {"cache_bytes": {**GAUGE, "samples": GAUGE["samples"] * (MOST_SAMPLES + 1)}},
        {"cache bytes": GAUGE},
        {"cache_bytes": {**GAUGE, "type": []}},
    ],
)
def test_a_malformed_answer_counts_as_none_and_the_others_are_exported(malformed: Any) -> None:
    targets = [Target("bad", Path()), Target("good", Path())]
    answers = [MountAnswer(targets[0], malformed), MountAnswer(targets[1], ANSWER["metrics"])]
    found = scraped(registry_of(MountCollector(lambda: targets, lambda _: answers)))
    assert found['fusefs_volume_up{volume="bad"}'] == 0
    assert found['fusefs_volume_up{volume="good"}'] == 1
    assert found['fusefs_cache_bytes{volume="good"}'] == 7
    assert 'fusefs_cache_bytes{volume="bad"}' not in found


def test_a_name_that_another_version_means_otherwise_hides_no_metrics_of_other_mounts() -> None:
    odd = {"cache_bytes": {**GAUGE, "type": "counter"}, "own": {**GAUGE, "help": "\ud800"}}
    targets = [Target("odd", Path()), Target("good", Path())]
    answers = [MountAnswer(targets[0], odd), MountAnswer(targets[1], ANSWER["metrics"])]
    found = scraped(registry_of(MountCollector(lambda: targets, lambda _: answers)))
    assert found['fusefs_cache_bytes{volume="good"}'] == 7
    assert found['fusefs_own{volume="odd"}'] == 7
    assert 'fusefs_cache_bytes{volume="odd"}' not in found


def test_a_mount_cannot_pass_for_another_nor_for_up() -> None:
    target = Target("honest", Path())
    samples = [{"labels": {"volume": "other"}, "value": 3}]
    metrics = {name: {**GAUGE, "samples": samples} for name in ("cache_bytes", "volume_up")}
    collector = MountCollector(lambda: [target], lambda _: [MountAnswer(target, metrics)])
    found = scraped(registry_of(collector))
    assert found == {
        'fusefs_volume_up{volume="honest"}': 1,
        'fusefs_cache_bytes{volume="honest"}': 3,
    }


def test_addresses_are_read() -> None:
    assert main.address_of("node.example:9811") == ("node.example", 9811)
    assert main.address_of(":9811") == ("", 9811)
    assert main.address_of("[::1]:0") == ("::1", 0)


@pytest.mark.parametrize(
    "text",
    ["", "9811", "host", "host:http", "::1:9811", "h:70000", "a/b:1", f":{'9' * 5000}", ":٣"],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"127.0.0.1:9811|\[::1\]:"):
        main.address_of(text)


def test_an_address_that_cannot_be_used_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, why in (("127.0.0.1", "Address already in use"), ("a" * 64, "too long")):
            with pytest.raises(CommandError, match=f"can't listen on {host}:{port}: .*{why}"):
                main.run((host, port), None)


def test_a_file_is_readable_for_its_collector_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        main.run(None, str(tmp_path / "fusefs.prom"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "fusefs.prom").stat().st_mode) == 0o644
