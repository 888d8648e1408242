"""The journal: what was written is what is read back, whatever tore the log."""

import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.posix.journal import journal, records
from fusefs.posix.journal.journal import Journal
from fusefs.posix.journal.records import (
    KernelState,
    LoggedHandle,
    LoggedNode,
    UnusableJournalError,
    replay,
)
from fusefs.store.interface import ObjectInfo
from tests.support.machine.disks import small_disk

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
IDS = st.integers(1, 20)
U64 = st.integers(0, 2**64 - 1)
INFO = st.builds(
    ObjectInfo,
    key=TEXT,
    size=U64,
    etag=TEXT,
    mtime_ns=st.integers(-(2**63), 2**63 - 1),
    storage_class=TEXT,
)
EVENT = st.one_of(
    st.tuples(st.just("node"), IDS, IDS, U64, TEXT, st.none() | INFO, U64),
    st.tuples(st.just("count"), IDS, U64),
    st.tuples(st.just("gone"), IDS),
    st.tuples(st.just("opened"), U64, IDS, IDS, st.integers(0, 2**32 - 1), st.integers(0, 2)),
    st.tuples(st.just("closed"), IDS),
    st.tuples(st.just("negotiated"), st.binary(max_size=64)),
    st.tuples(st.just("replaced"), IDS),
    st.tuples(st.just("table"), U64, U64, st.integers(0, 2**63 - 1)),
)


def tell(log: Journal, model: KernelState, event: tuple) -> None:
    """Write one event, and note what a reader of the log should find."""
    match event:
        case ("node", nodeid, parent, ino, name, info, count):
            model.nodes[nodeid] = LoggedNode(nodeid, parent, ino, name, count, info)
            log.node(nodeid, parent, ino, name, count, info, 0)
            model.next_id = max(model.next_id, nodeid + 1)
        case ("count", nodeid, count):
            log.count(nodeid, count)
            if nodeid in model.nodes:
                model.nodes[nodeid].nlookup = count
        case ("gone", nodeid):
            log.gone(nodeid)
            model.nodes.pop(nodeid, None)
            model.replaced.discard(nodeid)
        case ("opened", unique, fh, nodeid, flags, mode):
            log.opened(unique, fh, nodeid, flags, mode, 7)
            model.handles[fh] = LoggedHandle(unique, fh, nodeid, flags, mode, 7)
            model.next_fh = max(model.next_fh, fh + 1)
        case ("closed", fh):
            log.closed(fh)
            model.handles.pop(fh, None)
        case ("negotiated", init_out):
            log.negotiated(init_out)
            model.init_out = init_out
        case ("replaced", nodeid):
            log.replaced(nodeid)
            model.replaced.add(nodeid)
            model.next_id = max(model.next_id, nodeid + 1)
        case ("table", next_id, next_fh, mounted_ns):
            log.table(next_id, next_fh, mounted_ns)
            model.next_id = max(model.next_id, next_id)
            model.next_fh = max(model.next_fh, next_fh)
            model.mounted_ns = mounted_ns


def retell(log: Journal, model: KernelState) -> Iterator[None]:
    """Write every item that is still there, with a pause before each, as a compaction does."""
    log.table(model.next_id, model.next_fh, model.mounted_ns)
    for nodeid in list(model.nodes):
        yield
        if nodeid in model.nodes:
            node = model.nodes[nodeid]
            log.node(nodeid, node.parent, node.ino, node.name, node.nlookup, node.info, 0)
    for nodeid in list(model.replaced):
        log.replaced(nodeid)
    for fh in list(model.handles):
        yield
        if fh in model.handles:
            one = model.handles[fh]
            log.opened(one.unique, fh, one.nodeid, one.flags, one.mode, one.backing_id)


def append_raw(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def filled(path: Path, count: int = 40) -> KernelState:
    """A log of a few nodes and handles, closed as a kill leaves it."""
    log, model = Journal(path), KernelState()
    for number in range(1, count):
        info = ObjectInfo(f"p/{number}", number, f'"{number}"', number) if number % 3 else None
        tell(log, model, ("node", number, 1, number, f"n{number}", info, 1))
        tell(log, model, ("opened", number, number, number, 0, 0))
    log.close(remove=False)
    return model


@given(st.lists(EVENT, max_size=60))
def test_what_is_read_back_is_what_was_written(events: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "journal")
        log, model = Journal(path), KernelState()
        for event in events:
            tell(log, model, event)
        # Without a close, as after a SIGKILL.
        assert replay(path).state == model
        log.close(remove=True)


@given(st.lists(EVENT, max_size=40), st.lists(EVENT, max_size=40), st.lists(EVENT, max_size=10))
def test_compaction_while_it_is_written_keeps_the_state(
    before: list[tuple], meanwhile: list[tuple], after: list[tuple]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "journal")
        log, model = Journal(path), KernelState()
        for event in before:
            tell(log, model, event)
        log.begin_compaction()
        writing = retell(log, model)
        for event in meanwhile:
            next(writing, None)
            tell(log, model, event)
            assert replay(path).state == model
        for _ in writing:
            pass
        log.finish_compaction()
        assert replay(path).state == model
        for event in after:
            tell(log, model, event)
        assert replay(path).state == model
        assert os.listdir(directory) == ["journal"]
        log.close(remove=True)


@pytest.mark.parametrize(("field", "value"), [(2, b"%d" % (records.FORMAT + 1)), (3, b"other")])
def test_a_log_of_another_format_or_boot_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: int, value: bytes
) -> None:
    filled(tmp_path / "journal")
    assert replay(tmp_path / "journal")
    start = records.start_payload().split(b" ")
    start[field] = value
    monkeypatch.setattr(journal, "start_payload", lambda: b" ".join(start))
    filled(tmp_path / "journal")
    with pytest.raises(UnusableJournalError):
        replay(tmp_path / "journal")


@given(st.lists(EVENT, max_size=40), st.lists(EVENT, max_size=40), st.binary(max_size=200))
def test_a_resumed_log_goes_on_behind_its_last_good_record(
    before: list[tuple], after: list[tuple], torn: bytes
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "journal")
        log, model = Journal(path), KernelState()
        for event in before:
            tell(log, model, event)
        log.close(remove=False)
        append_raw(path, replay(path).stop, torn)
        resumed, state = Journal.resume(path)
        assert state == model
        for event in after:
            tell(resumed, model, event)
        assert replay(path).state == model
        resumed.close(remove=True)


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_log_goes_on_where_the_disk_is_full_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = filled(tmp_path / "journal")
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    resumed, state = Journal.resume(tmp_path / "journal")
    tell(resumed, state, ("count", 1, 7))
    assert state.nodes.keys() == whole.nodes.keys()
    assert replay(tmp_path / "journal").state == state
    resumed.close(remove=True)


def test_a_log_that_can_not_be_rewritten_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = filled(tmp_path / "journal")
    log, _ = Journal.resume(tmp_path / "journal")
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert not log.begin_compaction()
    assert not log.is_compacting
    log.table(90, 90, 1)
    log.finish_compaction()
    assert replay(tmp_path / "journal").state.nodes == whole.nodes
    assert os.listdir(tmp_path) == ["journal"]
    log.close(remove=True)


def two_mounts(directory: Path) -> tuple[Journal, Journal]:
    """The log of a mount that was detached, and that of the next one."""
    old, young = (Journal(journal.path_of(directory, number)) for number in (41, 52))
    old.table(3, 1, 1)
    young.table(7, 1, 2)
    return old, young


def mounts_found(directory: Path) -> list[int]:
    """When what is found as 41 and 52 was mounted."""
    paths = [journal.path_of(directory, number) for number in (41, 52)]
    return [replay(path).state.mounted_ns for path in paths]


def test_each_mount_of_a_mountpoint_has_its_log(tmp_path: Path) -> None:
    old, young = two_mounts(tmp_path)
    assert mounts_found(tmp_path) == [1, 2]
    for log, mounted_ns in ((old, 1), (young, 2)):
        log.begin_compaction()
        log.table(9, 9, mounted_ns)
        log.finish_compaction()
    assert mounts_found(tmp_path) == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["journal.41", "journal.52"]
    young.close(remove=False)
    old.close(remove=True)
    assert sorted(os.listdir(tmp_path)) == ["journal.52"]
    resumed, _ = Journal.resume(journal.path_of(tmp_path, 52))
    resumed.close(remove=True)
    assert os.listdir(tmp_path) == []


def test_a_mount_without_a_log_gets_none_of_another_mount(tmp_path: Path) -> None:
    """Its own was given up when the disk was full."""
    old, young = two_mounts(tmp_path)
    old.close(remove=True)
    with pytest.raises(FileNotFoundError):
        Journal.resume(journal.path_of(tmp_path, 41))
    young.close(remove=False)


def test_the_number_of_a_node_that_is_replaced_alone_is_not_used_again(tmp_path: Path) -> None:
    """As one has that was listed, and that the kernel did not get to know."""
    log = Journal(tmp_path / "journal")
    log.table(20, 1, 1)
    log.replaced(30)
    log.close(remove=False)
    assert replay(tmp_path / "journal").state.next_id == 31


def test_a_half_written_compaction_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = filled(path)
    path.with_suffix(".next").write_bytes(path.read_bytes()[:100])
    resumed, state = Journal.resume(path)
    assert state == whole
    assert os.listdir(tmp_path) == ["journal"]
    resumed.close(remove=True)


def test_many_nodes_take_little_room(tmp_path: Path) -> None:
    """Scaled down from a million nodes, which have to fit into 200 MiB."""
    count = 10_000
    log = Journal(tmp_path / "journal")
    for number in range(1, count + 1):
        key = f"train/n{number % 1000:08}/n{number:08}_10026.JPEG"
        info = ObjectInfo(key, 9, '"' + "e" * 32 + '"', 9)
        log.node(number, 1, number, key[-20:], 1, info, 0)
    log.close(remove=False)
    assert replay(tmp_path / "journal").stop < 200 * (1 << 20) * count // 1_000_000
    assert len(replay(tmp_path / "journal").state.nodes) == count


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8) as path:
        yield path


def test_a_full_disk_turns_the_journal_off_with_one_warning(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = Journal(disk / "journal")
    with caplog.at_level(logging.WARNING, logger="fusefs.journal"):
        for number in range(200_000):
            log.count(number, 1)
            log.opened(number, number, number, 0, 0, 0)
    assert len(caplog.records) == 1
    assert "take this mount over" in caplog.text
    assert os.listdir(disk) == []
    assert not log.wants_compaction
    log.close(remove=True)
