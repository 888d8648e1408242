"""What a daemon answers need be no answer: it may be a hostile one's, or of another version."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csi.errors import event_text
from csi.node import listing
from csi.node.config import MOUNT_RECORDS
from csi.node.mount_record import MountRecord, MountRecords
from csi.node.stats import Stats

GOOD: dict[str, Any] = {
    "writing": {"pending_files": 1, "pending_bytes": 2},
    "access": {"is_shut": False},
    "cache": {"used_bytes": 3},
}


def record_of(key: str) -> MountRecord:
    return MountRecord(key, "volume", f"/mounts/{key}", f"s3://{key}", "me", 1, "", "", 0.0)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {**GOOD, "access": None},
        {**GOOD, "cache": {"used_bytes": "3"}},
        {**GOOD, "cache": {"used_bytes": 10**400}},
        {**GOOD, "writing": {"pending_files": 1}},
        {**GOOD, "writing": {"pending_files": [], "pending_bytes": -1}},
        {**GOOD, "writing": 7},
    ],
)
def test_a_daemon_without_a_status_keeps_no_other_volume_from_the_list(
    answer: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = MountRecords(tmp_path / MOUNT_RECORDS)
    for key in ("good", "odd"):
        records.write(key, record_of(key))
    table = SimpleNamespace(
        top=lambda path: SimpleNamespace(device=path.name),
        of_device=lambda name: [SimpleNamespace(mountpoint=Path(f"/pods/{name}/mount"))],
    )
    monkeypatch.setattr(listing, "MountTable", lambda: table)
    monkeypatch.setattr(listing, "use_runtime_directory", lambda _path: None)
    monkeypatch.setattr(listing, "_ask", lambda record: answer if record.key == "odd" else GOOD)
    listing.run(SimpleNamespace(state_dir=tmp_path, json=False))  # type: ignore[arg-type]
    _, good, odd = capsys.readouterr().out.splitlines()
    assert good.split() == [
        "-",
        "-",
        "volume",
        "s3://good",
        "me",
        "0.0",
        "MiB",
        "1",
        "(0.0",
        "MiB)",
        "ok",
    ]
    assert odd.split()[3:] == ["s3://odd", "me", *"--", "does", "not", "report", "its", "status"]
    listing.run(SimpleNamespace(state_dir=tmp_path, json=True))  # type: ignore[arg-type]
    rows = json.loads(capsys.readouterr().out)
    assert [row["pending_files"] for row in rows] == [1, None]


@pytest.mark.parametrize("answer", [{}, {"bytes": -1, "files": 0}, {"bytes": 7, "files": 10**30}])
def test_the_last_usage_counts_where_a_daemon_answers_none(answer: dict[str, Any]) -> None:
    answers = [{"bytes": 5, "files": 6}, answer]
    mounts: Any = SimpleNamespace(ask=lambda _record, command: answers.pop(0))
    stats = Stats(mounts)
    for _ in range(2):
        usage = stats.of(record_of("key")).usage
        assert [each.used for each in usage] == [5, 6]


@pytest.mark.parametrize("value", ["x", "ü", "€", "😀"])
def test_an_error_that_quotes_a_huge_value_is_short_and_says_what_is_wrong(value: str) -> None:
    sentence = f"bucket: {value * 100_000} is no name of a bucket"
    text = event_text(sentence)
    assert len(text.encode()) <= 1024
    assert text.startswith(f"bucket: {value}")
    assert text.endswith(f"{value} is no name of a bucket")
    assert event_text(sentence[:200]) == sentence[:200]
