"""Records of mounts, pods and volumes, odd answers of daemons, and the driver's own limits."""

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from csi import main
from csi.controller.volume_record import FOLDER, VolumeRecord, VolumeRecords
from csi.errors import event_text
from csi.node import config, drain, listing, record_files, warmup
from csi.node.config import MOUNT_RECORDS
from csi.node.drain import Drains, UploadingError
from csi.node.mount_record import MountRecord, MountRecords
from csi.node.pod_records import PodRecord, PodRecords
from csi.node.warmup import Warmups
from csi.volume.options import WarmOption
from fusefs.launch.control import ControlError
from fusefs.launch.registry import RUNTIME_VARIABLE, STAGING, directory_of
from fusefs.settings.mount import MountSettings
from fusefs.settings.types import MountSource
from fusefs.store.interface import ObjectVersion
from tests.support.waiting import until

UNKNOWN = {"of_a_newer_driver": "auto"}


def a_record(settings: dict[str, str] | None = None, key: str = "key") -> MountRecord:
    place, source = f"/mounts/{key}", f"s3://{key}"
    return MountRecord(key, "volume", place, source, "me", 1, "", settings or {}, 0.0)


def test_records_are_read_but_for_fields_that_are_unknown(tmp_path: Path) -> None:
    mounts, pods = MountRecords(tmp_path / "mounts"), PodRecords(tmp_path / "pods")
    warmups, first = Warmups(tmp_path / "warming"), WarmOption(("a",), is_first=True)
    mounts.write("key", a_record())
    pods.note(pod := PodRecord("/pods/uid", "default", "pod"))
    (tmp_path / "warming/key.json").write_text('{"began": 1.0, "is_over": true, "waiting": {}}')
    for path in tmp_path.glob("*/*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | UNKNOWN))
    assert mounts.all() == [a_record()]
    assert pods.all() == {Path("/pods/uid"): pod}
    assert not warmups.blocks_publish(a_record(), first)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": "key"}', "null", "7"])
def test_a_file_without_a_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "key.json").write_text(text)
    assert MountRecords(tmp_path).all() == []


def test_uploads_are_given_up_in_time_though_drivers_change_and_a_setting_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = MountSettings(
        source=MountSource("bucket"),
        mountpoint=Path("/mounts/key"),
        cache_dir=Path("/cache/domain"),
    )
    record = replace(a_record(known.as_texts() | UNKNOWN), drain_timeout_s=0.1)
    mounts: Any = SimpleNamespace(records=MountRecords(tmp_path))
    monkeypatch.setattr(Drains, "pending", lambda *_: ("1 files", True))
    with pytest.raises(UploadingError):
        Drains(mounts).check(record)
    time.sleep(0.1)
    Drains(mounts).check(record)
    assert "the files are kept below /cache/domain" in caplog.text


@pytest.mark.parametrize(
    "status",
    [None, {}, {"writing": 7}, {"writing": {"pending_files": 1}}]
    + [{"writing": {"pending_files": 1, "pending": files}} for files in ([], [{}], 7)],
)
def test_the_answer_of_a_hostile_daemon_delays_the_end_of_its_mount_and_no_more(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: object,
) -> None:
    monkeypatch.setattr(drain, "MountTable", lambda: SimpleNamespace(top=lambda root: root))
    monkeypatch.setattr(MountRecord, "status", lambda _record: status)
    mounts: Any = SimpleNamespace(
        is_alive=lambda *_: True, supervisor=None, records=MountRecords(tmp_path)
    )
    drains = Drains(mounts)
    with pytest.raises(UploadingError, match="does not report"):
        drains.check(replace(a_record(), drain_timeout_s=600.0))
    drains.check(a_record())
    assert "given up" in caplog.text


def test_the_files_of_a_hostile_daemon_lead_root_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path / "run"))
    monkeypatch.setattr(drain, "MountTable", lambda: SimpleNamespace(top=lambda root: root))
    supervisor = SimpleNamespace(serves=lambda *_, **__: False, has=lambda _root: True)
    mounts: Any = SimpleNamespace(is_alive=lambda *_: False, supervisor=supervisor)
    record = a_record({"cache_dir": str(tmp_path / "cache")})
    run = directory_of(Path(record.root))
    state, other = (tmp_path / name / "mounts" / run.name for name in ("cache", "other"))
    for place, name in ((state / "staging/7", "own"), (other / "staging/7", "not-its-own")):
        place.mkdir(parents=True)
        (place / "1").touch()
        staged = {"key": [name], "is_unlinked": False, "uploaded": None}
        (place / "1.json").write_text(json.dumps(staged))
        (place / "2").touch()
        (place / "2.json").write_text("[" * 100_000)
        (place / "3").touch()
        (place / "3.json").mkdir()
    (other / "x.json").touch()
    (state / "renames").symlink_to(other)
    run.mkdir(parents=True)
    (run / STAGING).symlink_to(other / "staging/7")
    open_before = len(os.listdir("/proc/self/fd"))
    left = "s3://key has no daemon; not in the bucket yet: ['own'] (not uploaded)"
    assert Drains(mounts).pending(record) == (left, True)
    assert len(os.listdir("/proc/self/fd")) == open_before


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_target_that_does_not_wait_for_a_warm_up_is_not_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warmups, waiting = Warmups(tmp_path), Path("/pods/waiting")
    warmups.add_waiter("key", WarmOption(("a",)), waiting)
    monkeypatch.setattr(record_files, "replace_file", no_space)
    warmups.remove_waiter("key", Path("/pods/other"))
    assert caplog.text == ""
    warmups.remove_waiter("key", waiting)  # it may end later, but the pod need not wait
    assert "stays on record as waiting" in caplog.text


def test_a_warm_up_that_failed_is_begun_by_the_next_pod_and_a_new_mounts_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, begun = [ControlError("no"), OSError(errno.ENOSPC, "full")], []

    def ask(_record: MountRecord, warm: WarmOption) -> None:
        begun.append(warm)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(warmup, "_jobs", ask)
    for is_new in (False, False, False, False, True):
        Warmups(tmp_path).begin(a_record(), WarmOption(("a",)), is_new=is_new)
    assert len(begun) == 4


@pytest.mark.parametrize(
    "answer", [{}, {"jobs": [{}]}, {"jobs": [{"path": "a", "state": "ended"}]}]
)
def test_a_pod_starts_though_its_mount_reports_no_progress(
    answer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "daemon_request", lambda *_: answer)
    warmups, warm = Warmups(tmp_path), WarmOption(("a",), is_first=True)
    warmups.wait(a_record(), warm, Path("/pods/one"), time.monotonic() + 60)
    assert not warmups.blocks_publish(a_record(), warm)
    warmups.forget(a_record().key)
    warmups.begin(a_record(), warm, is_new=False)


class PlayedBucket:
    """A bucket with the records of volumes of these names; `on_get` comes before each answer."""

    url = "aws://bucket"

    def __init__(self, *names: str, on_get: Callable[[], object] = lambda: None) -> None:
        self.names = names
        self.read: list[str] = []
        self._on_get = on_get

    def pages(self, prefix: str) -> Iterator[list[ObjectVersion]]:
        for name in self.names:
            yield [ObjectVersion(f"{prefix}{name}", f'"{name}"', 1)]

    def get(self, key: str) -> bytes:
        self._on_get()
        self.read.append(key)
        name = key.removeprefix(FOLDER)
        return VolumeRecord(name, f"{name}/", True, "cluster", 0, {}, "now").to_json()


def keys(
    records: VolumeRecords, *names: str, on_get: Callable[[], object] = lambda: None
) -> list[str]:
    bucket = PlayedBucket(*names, on_get=on_get)
    played: Any = bucket
    return [key.removeprefix(FOLDER) for key, _ in records.now(played)] + bucket.read


def test_records_of_deleted_volumes_are_forgotten() -> None:
    records = VolumeRecords()
    for number in range(3):
        name = f"volume-{number}"
        assert keys(records, name) == [name, FOLDER + name]
        assert keys(records, name) == [name]
    assert len(records._known) == 1


def test_a_record_is_listed_though_another_listing_was_made_before_it() -> None:
    records = VolumeRecords()
    found = keys(records, "one", "two", on_get=lambda: keys(records))
    assert found[:2] == ["one", "two"]


GOOD: dict[str, Any] = {
    "writing": {"pending_files": 1, "pending_bytes": 2},
    "access": {"is_shut": False},
    "cache": {"used_bytes": 3},
}


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
        records.write(key, a_record(key=key))
    table = SimpleNamespace(
        top=lambda path: SimpleNamespace(device=path.name),
        of_device=lambda name: [SimpleNamespace(mountpoint=Path(f"/pods/{name}/mount"))],
    )
    monkeypatch.setattr(listing, "MountTable", lambda: table)
    monkeypatch.setattr(listing, "use_runtime_directory", lambda _path: None)
    monkeypatch.setattr(
        MountRecord, "status", lambda record: answer if record.key == "odd" else GOOD
    )
    listing.run(SimpleNamespace(state_dir=tmp_path, json=False))  # type: ignore[arg-type]
    _, good, odd = capsys.readouterr().out.splitlines()
    assert " ".join(good.split()) == "- - volume s3://good me 0.0 MiB 1 (0.0 MiB) ok"
    assert odd.split()[3:] == ["s3://odd", "me", *"--", "does", "not", "report", "its", "status"]
    listing.run(SimpleNamespace(state_dir=tmp_path, json=True))  # type: ignore[arg-type]
    rows = json.loads(capsys.readouterr().out)
    assert [row["pending_files"] for row in rows] == [1, None]


@pytest.mark.parametrize("value", ["x", "ü", "€", "😀"])
def test_an_error_that_quotes_a_huge_value_is_short_and_says_what_is_wrong(value: str) -> None:
    sentence = f"bucket: {value * 100_000} is no name of a bucket"
    text = event_text(sentence)
    assert len(text.encode()) <= 1024
    assert text.startswith(f"bucket: {value}")
    assert text.endswith(f"{value} is no name of a bucket")
    assert event_text(sentence[:200]) == sentence[:200]


def test_a_second_driver_of_a_node_waits_for_the_end_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = os.open(tmp_path / config.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(first, fcntl.LOCK_EX)
    second = threading.Thread(target=config.be_the_only_driver, args=(tmp_path,), daemon=True)
    second.start()
    until(lambda: "another driver serves this node" in caplog.text)
    assert second.is_alive()
    os.close(first)
    second.join(30)
    assert not second.is_alive()


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--memory-limit=64MiB", "'64MiB' is too small; the least is 112MiB"),
        ("--cache-size=50G", "'50G' is ambiguous; write 50GiB (units of 1024)"),
        ("--max-connections=0", "'0' is not a whole number from 1 to 1024"),
        ("--max-connections=5000", "'5000' is not a whole number from 1 to 1024"),
        ("--min-free=a fifth", "'a fifth' is not"),
        ("--metrics=9811", "'9811' is not like 127.0.0.1:9811"),
    ],
)
def test_a_limit_that_no_mount_could_have_is_refused_at_the_start_with_what_is_wrong(
    flag: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["node", "--endpoint", "unix:///csi.sock", "--node-id", "node-1", flag]
    with pytest.raises(SystemExit) as ended:
        main.make_parser().parse_args(line)
    assert ended.value.code == 2
    assert f"{flag.partition('=')[0]}: {sentence}" in capsys.readouterr().err
