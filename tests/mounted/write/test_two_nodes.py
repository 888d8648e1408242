"""Two nodes change one file: mounts with caches of their own, and a store that is not near."""

import errno
import fcntl
import functools
import mmap
import os
import random
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import pytest

from tests.support.mounting import WRITABLE, Mount, Mounter, all_sent, cost, fusefs, metadata
from tests.support.semantics import states
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.sharing import in_storms
from tests.support.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("as_owner")]

FAR_S, TAIL_S = 0.03, 0.3
# An edit of a file of this size is made without a download.
LARGE = 20 << 20


@dataclass
class Nodes:
    """Two mounts of one bucket, or one, of which the test has a folder, through the proxy."""

    mounts: list[Mount]
    faulty: FaultyS3
    bucket: Bucket

    @property
    def paths(self) -> list[Path]:
        return [mount.path / self.bucket.prefix for mount in self.mounts]

    def both(self, work: Callable[[Path], None]) -> None:
        """Do something on both nodes at the same time."""
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work, path) for path in self.paths]:
                done.result()

    def sync(self) -> None:
        for mount in self.mounts:
            fusefs("sync", mount.path)

    def conflicts(self, name: str) -> list[bytes]:
        """The contents that are kept beside an object."""
        found = [key for key in keys(self.bucket) if key.startswith(f"{name}.conflict-")]
        return [stored(self.bucket, key) for key in found]


MakeNodes = Callable[..., Nodes]


@pytest.fixture(scope="module")
def pair(faulty: FaultyS3, module_mounter: Mounter) -> Callable[[str], list[Mount]]:
    """Two mounts with a certain durability, for all tests."""

    @functools.cache
    def mounted(durability: str) -> list[Mount]:
        options = (WRITABLE, "--durability", durability)
        caches = [f"{durability}-{number}" for number in range(2)]
        url = faulty.endpoint_url
        return [module_mounter(*options, endpoint_url=url, cache=cache) for cache in caches]

    return mounted


@pytest.fixture
def nodes(
    pair: Callable[[str], list[Mount]], mounter: Mounter, faulty: FaultyS3, folder: Bucket
) -> MakeNodes:
    """Makes the test's two nodes: mounts of its own if it has options, or one of its own alone.

    Of its folder they know nothing yet but that it is there; `files` are in it.
    """

    def make(
        *options: str, durability: str = "auto", is_alone: bool = False, **files: bytes
    ) -> Nodes:
        for name, content in files.items():
            folder.put(name, content)
        if options or is_alone:
            caches = ("one",) if is_alone else ("one", "two")
            given = {"endpoint_url": faulty.endpoint_url, "bucket": folder}
            mounts = [mounter(WRITABLE, *options, cache=cache, **given) for cache in caches]
        else:
            mounts = pair(durability)
        both = Nodes(mounts, faulty, folder)
        if not files:
            both.paths[0].mkdir()
        until(lambda: all(path.is_dir() for path in both.paths), "both nodes see the folder")
        faulty.clear()
        tail = random.Random(1)
        faulty.add(before=lambda: time.sleep(TAIL_S if tail.random() < 0.01 else FAR_S))
        return both

    return make


def name_of(path: Path) -> str:
    """The name of the node on which a path is."""
    return path.parent.name


def append(path: Path, line: str) -> None:
    with open_to_append(path) as file:
        file.write(line)


def open_to_append(path: Path) -> TextIO:
    """Open a file until the other node does not replace it twice meanwhile, which is ESTALE."""
    while True:
        try:
            return open(path, "a")
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise


def is_stale(work: Callable[[], object]) -> bool:
    """True if a program is told that the object was replaced; any other error is raised."""
    try:
        work()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return True
    return False


@states(
    "What is appended (O_APPEND) goes behind what the bucket has when it is uploaded: of two nodes"
    " that append to one file, in turn or at the same time, it has the writes of both, each whole."
)
@pytest.mark.parametrize("size", [0, LARGE], ids=["new", "large"])
def test_two_nodes_append_in_turn(nodes: MakeNodes, size: int) -> None:
    both, lines = nodes(**({"log": bytes(size)} if size else {})), []
    rounds = 3 if size else 10
    for number in range(rounds):
        for path in both.paths:
            lines.append(f"{name_of(path)} {number}\n")
            append(path / "log", lines[-1])
            if number < 4:  # later closes of a run may wait for the local disk alone
                assert stored(both.bucket, "log").endswith(lines[-1].encode())
    both.sync()
    assert stored(both.bucket, "log") == bytes(size) + "".join(lines).encode()
    assert (path / "log").read_bytes()[size:].decode() == "".join(lines)
    assert both.conflicts("log") == []


@states(
    "What goes behind an object that another node has made leaves it its owner and its mode, which"
    " the appending program may not have seen yet."
)
def test_what_is_appended_leaves_the_mode_of_another_nodes_file(nodes: MakeNodes) -> None:
    both = nodes()
    first, second = (path / "log" for path in both.paths)
    append(first, "old\n")
    second.unlink()
    with open(second, "w", opener=partial(os.open, mode=0o600)) as file:
        file.write("new\n")
    append(first, "more\n")
    assert stored(both.bucket, "log") == b"new\nmore\n"
    made = metadata(both.bucket, "log")
    assert int(made["mode"]) & 0o777 == first.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("durability", ["auto", "local"])
def test_two_nodes_append_at_the_same_time(nodes: MakeNodes, durability: str) -> None:
    both = nodes(durability=durability)

    def work(path: Path) -> None:
        for number in range(20):
            append(path / "log", f"{name_of(path)} {number}\n")

    both.both(work)
    both.sync()
    lines = stored(both.bucket, "log").decode().splitlines()
    for path in both.paths:
        own = [f"{name_of(path)} {number}" for number in range(20)]
        assert [line for line in lines if line in own] == own
    assert len(lines) == 40
    assert both.conflicts("log") == []


def test_a_file_that_stays_open_is_appended_to_behind_what_another_node_appends(
    nodes: MakeNodes,
) -> None:
    """Also while programs read it: those see what is behind it from their next open on."""
    both = nodes()
    one, two = both.paths
    with open(one / "log", "ab", 0) as first, open(one / "log", "rb", 0) as reader:
        for number in range(3):
            first.write(b"one %d\n" % number)
            os.fsync(first.fileno())
            append(two / "log", f"two {number}\n")
            first.write(b"one again %d\n" % number)
            os.fsync(first.fileno())
            assert reader.read()
    both.sync()
    wanted = b"".join(
        b"one %d\ntwo %d\none again %d\n" % (number, number, number) for number in range(3)
    )
    assert stored(both.bucket, "log") == wanted
    assert (one / "log").read_bytes() == wanted


@states(
    "A program that opens a file to change it, not only to append and not with O_TRUNC, gets the"
    " content that the bucket has at that moment."
)
@pytest.mark.parametrize("size", [40_000, LARGE])
def test_two_nodes_edit_in_turn(nodes: MakeNodes, size: int) -> None:
    both = nodes(file=bytes(size))
    expected = bytearray(size)
    for number in range(10 if size < LARGE else 3):
        for path in both.paths:
            with open(path / "file", "r+b") as file:
                assert file.read(100) == expected[:100]
                file.seek(0)
                file.write(f"{name_of(path)} {number:08}".encode())
                file.seek(number * 1000 + 500)
                file.write(name_of(path).encode())
            expected[: len(name_of(path)) + 9] = f"{name_of(path)} {number:08}".encode()
            start = number * 1000 + 500
            expected[start : start + len(name_of(path))] = name_of(path).encode()
    assert stored(both.bucket, "file") == expected
    assert both.conflicts("file") == []


def edit(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"ours")


def cut(path: Path, size: int = 4) -> None:
    with open(path, "r+b") as file:
        file.truncate(size)
        file.write(b"ours")


def store_through_a_mapping(path: Path) -> None:
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[:4] = b"ours"
        os.fsync(file.fileno())


def give_it_a_hole(path: Path) -> None:
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 20)
        os.pwrite(file.fileno(), b"ours", 0)


CHANGES = [edit, cut, store_through_a_mapping, partial(cut, size=0), give_it_a_hole]


@states(
    "An edit whose object another node has replaced since it was opened replaces nothing: `close`"
    " and `fsync` fail with ESTALE, and the content is kept as NAME.conflict-HOST-TIME."
)
@pytest.mark.parametrize("change", CHANGES)
def test_an_edit_of_what_was_replaced_is_told_and_kept(
    nodes: MakeNodes, change: Callable[[Path], None]
) -> None:
    both = nodes(file=b"old content")
    one, _ = both.paths
    both.faulty.clear()
    rule = both.faulty.add(
        "PUT", "*/file", times=1, before=lambda: both.bucket.put("file", b"theirs")
    )
    assert is_stale(lambda: change(one / "file"))
    assert rule.used
    assert stored(both.bucket, "file") == b"theirs"
    assert [kept[:4] for kept in both.conflicts("file")] == [b"ours"]
    assert (one / "file").read_bytes() == b"theirs"


@states(
    "Of two mounts that rewrite one file from scratch (O_TRUNC) the last to close wins, and"
    " neither fails."
)
@in_storms("rounds", 40, 3000)
@pytest.mark.parametrize("options", [(), ("--metadata-ttl", "0s")], ids=["default", "fresh"])
def test_two_nodes_rewrite_at_the_same_time(
    nodes: MakeNodes, options: tuple[str, ...], rounds: int
) -> None:
    both = nodes(*options)
    both.faulty.clear()

    def work(path: Path) -> None:
        for number in range(rounds):
            with open(path / "file", "w") as file:
                file.write(f"{name_of(path)} {number}")
            is_stale((path / "file").read_bytes)  # an object that is replaced twice meanwhile is

    both.both(work)
    assert stored(both.bucket, "file") in [
        f"{name_of(path)} {rounds - 1}".encode() for path in both.paths
    ]
    assert both.conflicts("file") == []


@states(
    "A file that is created without O_TRUNC and O_EXCL replaces no file that another node has made"
    " meanwhile: it is an edit of that one, or goes behind it."
)
def test_a_file_that_another_node_has_made_meanwhile_is_not_replaced(nodes: MakeNodes) -> None:
    both = nodes()
    one, _ = both.paths
    both.faulty.clear()
    for name in ("touched", "log", "data"):
        put = partial(both.bucket.put, name, b"theirs\n")
        both.faulty.add("PUT", f"*/{name}", times=1, before=put)
    (one / "touched").touch()
    append(one / "log", "ours\n")

    def create() -> None:
        fd = os.open(one / "data", os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(fd, b"ours\n")
        os.close(fd)

    assert is_stale(create)
    both.sync()
    assert stored(both.bucket, "touched") == b"theirs\n"
    assert stored(both.bucket, "log") == b"theirs\nours\n"
    assert stored(both.bucket, "data") == b"theirs\n"
    assert both.conflicts("data") == [b"ours\n"]


@states("Of a file that a program has open for writing `close` and `fsync` fail with ESTALE then.")
def test_attributes_do_not_bring_back_what_another_node_has_replaced(nodes: MakeNodes) -> None:
    both = nodes(file=b"old")
    one, _ = both.paths

    def describe() -> None:
        with open(one / "file", "r+b") as file:
            both.bucket.put("file", b"theirs")
            os.fchmod(file.fileno(), 0o600)
            os.fsync(file.fileno())

    assert is_stale(describe)
    assert keys(both.bucket) == ["file"]
    assert stored(both.bucket, "file") == b"theirs"


def test_the_rename_of_a_file_with_pending_edits_keeps_what_another_node_has_put(
    nodes: MakeNodes,
) -> None:
    both = nodes(file=b"old_ontent")
    one, _ = both.paths
    with open(one / "file", "r+b", 0) as file:
        file.write(b"ours")
        both.bucket.put("file", b"theirs")
        (one / "file").rename(one / "new")
        assert is_stale(lambda: os.fsync(file.fileno()))
    kept = {stored(both.bucket, key) for key in keys(both.bucket)}
    assert kept == {b"theirs", b"oursontent"}


def test_a_run_of_appends_and_edits_costs_no_more_requests_than_they_need(
    mounter: Mounter, bucket: Bucket
) -> None:
    """Appends need no look into the bucket; an edit takes a HEAD, or the GET that it needs."""
    bucket.put("file", b"content")
    mount = mounter(WRITABLE, "--metadata-ttl", "1m")  # names last, however busy the machine is
    log, file = mount.path / "log", mount.path / "file"
    append(log, "first\n")

    def appends() -> None:
        for number in range(3):
            append(log, f"{number}\n")

    assert cost(mount, appends) == {"puts": 3}
    os.stat(file)
    assert cost(mount, lambda: edit(file)) == {"gets": 1, "puts": 1}
    assert cost(mount, lambda: edit(file)) == {"heads": 1, "puts": 1}
    assert cost(mount, lambda: file.write_bytes(b"anew")) == {"puts": 1}


@states(
    "There a program changes a file without a look into the bucket; where the object has been"
    " replaced, `close` and `fsync` fail with ESTALE, and both contents are kept."
)
def test_a_bucket_that_never_changes_is_not_looked_at(mounter: Mounter, bucket: Bucket) -> None:
    bucket.put("file", b"content")
    mount = mounter(WRITABLE, "--metadata-ttl", "indefinite")
    file = mount.path / "file"
    edit(file)
    assert cost(mount, lambda: edit(file)) == {"puts": 1}
    bucket.put("file", b"theirs")
    ours = file.read_bytes()
    assert is_stale(lambda: edit(file))
    assert stored(bucket, "file") == b"theirs"
    [conflict] = [key for key in keys(bucket) if key.startswith("file.conflict-")]
    assert stored(bucket, conflict) == ours


@states(
    "What was closed before the daemon or the mount died is treated likewise: appended bytes go"
    " behind the object that is there by then, and an edit is kept beside it.",
    "What an earlier mount left is uploaded beside what somebody else has written since, as"
    " NAME.conflict-HOST-TIME, but for what was only appended, which goes behind it.",
)
def test_what_was_appended_before_the_daemon_was_killed_goes_behind(nodes: MakeNodes) -> None:
    both = nodes(durability="local")
    first, _ = both.mounts
    here, there = both.paths
    append(here / "log", "old\n")
    both.sync()
    both.faulty.clear()
    # Refused, and not held back: what is held back may still be carried out after the kill.
    refusal = both.faulty.add("PUT", "*/log", code="InternalError")
    append(here / "log", "one\n")
    first.kill()
    both.faulty.remove(refusal)
    append(there / "log", "two\n")
    fusefs("sync", there)
    first.start()
    all_sent(first)
    until(lambda: stored(both.bucket, "log") == b"old\ntwo\none\n", "both lines are there")


@states(
    "Where `close` does not wait for the bucket, the log alone tells of that; it names SQLite and"
    " LMDB databases as such."
)
def test_the_log_tells_of_a_database_that_two_nodes_have_changed(nodes: MakeNodes) -> None:
    both = nodes(durability="local")
    both.faulty.clear()
    first, second = both.mounts
    for path in both.paths:
        with sqlite3.connect(path / "data.db", timeout=60) as database:
            database.execute("create table if not exists t (x)")
        fusefs("sync", path)
    for path in both.paths:
        with sqlite3.connect(path / "data.db", timeout=60) as database:
            database.execute("insert into t values (1)")
    both.sync()
    until(lambda: both.conflicts("data.db"), "both are kept")
    log = first.log.read_text() + second.log.read_text()
    assert "it is an SQLite database" in log


@states(
    "No lock holds on another mount, of this or another node: what relies on locks, as SQLite and"
    " LMDB do, is for programs of one mount at a time."
)
def test_locks_are_a_mounts_own(nodes: MakeNodes) -> None:
    both = nodes()
    one, two = both.paths
    (one / "file").touch()
    with open(one / "file", "r+b") as first, open(two / "file", "r+b") as second:
        for lock in (fcntl.flock, fcntl.lockf):
            lock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


@states(
    "Where the store ignores conditions, of two nodes that change one file at the same time the"
    " last to close wins."
)
def test_without_conditions_the_last_close_wins(nodes: MakeNodes) -> None:
    both = nodes(is_alone=True, file=b"old")
    both.faulty.clear()
    both.faulty.ignores_conditions = True
    with open(both.paths[0] / "file", "r+b") as file:
        file.write(b"ours")
        both.bucket.put("file", b"theirs")
    assert stored(both.bucket, "file") == b"ours"


def test_a_store_that_refuses_conditions_is_written_to_all_the_same(nodes: MakeNodes) -> None:
    both = nodes(is_alone=True, file=b"old")
    both.faulty.clear()
    [one] = both.paths
    for header in ("if-match", "if-none-match"):
        both.faulty.add("PUT", "*/file", code="NotImplemented", with_header=header)
        both.faulty.add("PUT", "*/new", code="NotImplemented", with_header=header)
    edit(one / "file")
    append(one / "file", "more")
    append(one / "new", "new")
    assert stored(both.bucket, "file") == b"oursmore"
    assert stored(both.bucket, "new") == b"new"


@states(
    "Under `--session pyfuse3`, and of a file that a program here reads by passthrough, what is"
    " appended is an edit like any other."
)
@pytest.mark.parametrize("options", [(), ("--session", "pyfuse3")], ids=["kernel", "pyfuse3"])
def test_what_can_not_go_behind_another_object_is_told(
    nodes: MakeNodes, options: tuple[str, ...]
) -> None:
    both = nodes(*options, is_alone=bool(options), file=b"old\n")
    both.faulty.clear()
    one = both.paths[0]
    with open(one / "file", "rb") as reader:
        assert reader.read() == b"old\n"
        both.faulty.add("PUT", "*/file", times=1, before=lambda: both.bucket.put("file", b"theirs"))
        assert is_stale(lambda: append(one / "file", "ours\n"))
    assert stored(both.bucket, "file") == b"theirs"
    assert both.conflicts("file") == [b"old\nours\n"]
