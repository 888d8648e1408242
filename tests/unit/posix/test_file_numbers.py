"""Inode numbers of files, and the metadata that objects carry."""

import random
import stat
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.posix.journal.journal import Journal
from fusefs.posix.journal.records import LEAST_HASH, replay
from fusefs.posix.nodes import file_numbers, object_metadata
from fusefs.posix.nodes.inode_table import Inode, InodeTable
from fusefs.posix.nodes.object_metadata import PERMISSIONS, Form, Meta
from fusefs.posix.restore.from_journal import restore_table
from fusefs.store.fencing import CHANGE_SIZE, METADATA_LIMIT
from fusefs.store.interface import ObjectInfo
from tests.support.semantics import states


def look_up(table: InodeTable, name: str, parent: Inode | None = None) -> Inode:
    parent = parent or table.root
    key = table.key(parent) + name
    inode = table.resolve(parent, name, ObjectInfo(key, 3, '"1"', 5))
    table.count(inode, 0.0)
    return inode


def remove(table: InodeTable, name: str) -> None:
    table.numbers.removed(table.root, name, is_directory=False)
    inode = (table.root.children or {}).get(name)
    table.detach([inode] if inode is not None else [])


def test_a_mount_of_a_prefix_has_the_numbers_of_a_mount_of_the_bucket() -> None:
    whole, part = InodeTable("", Journal(None)), InodeTable("a/b/", Journal(None))
    directory = whole.resolve(whole.resolve(whole.root, "a", None), "b", None)
    assert look_up(whole, "file", directory).ino == look_up(part, "file").ino


def test_a_file_and_a_directory_of_one_name_have_different_numbers() -> None:
    table = InodeTable("", Journal(None))
    file = look_up(table, "a")
    assert table.resolve(table.root, "a", None).ino != file.ino


@states(
    "Of the names that were changed here the latest 57,344 are sure to be remembered; a file of"
    " an older one that nobody uses may then get the number of its path, but no file that of"
    " another."
)
def test_of_many_changed_names_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_numbers.MOST_RECORDS * 7 // 8 == 57_344
    monkeypatch.setattr(file_numbers, "MOST_RECORDS", 64)
    table = InodeTable("", Journal(None))
    first = look_up(table, "removed-0").ino
    table.forget(look_up(table, "removed-0").nodeid, 2)
    for number in range(200):
        remove(table, f"removed-{number}")
        assert len(dict(table.numbers.records())) <= 64
    assert len(dict(table.numbers.records())) >= 56
    assert look_up(table, "removed-0").ino == first
    assert look_up(table, "removed-144").ino < LEAST_HASH


class Files:
    """Files by name, each with the number that it was first seen with."""

    def __init__(self, log: Journal, *, remembers_all: bool) -> None:
        self.remembers_all = remembers_all
        self.table = InodeTable("", log)
        self.dice = random.Random(7)
        self.names = [f"n{number}" for number in range(40)]
        # The file that a name stands for, and what the kernel knows and keeps open.
        self.named: dict[str, Inode] = {}
        self.removed: list[Inode] = []

    def step(self) -> None:
        name, other = self.dice.sample(self.names, 2)
        choice = self.dice.random()
        if name not in self.named:
            self.named[name] = look_up(self.table, name)
        elif choice < 0.3:
            self.table.numbers.removed(self.table.root, name, is_directory=False)
            self.gone(name)
        elif choice < 0.7:
            if other in self.named:
                self.gone(other)
            inode = self.named[other] = self.named.pop(name)
            self.table.move(inode, self.table.root, other)
        else:
            self.forget(self.named[name])
            number = self.named[name].ino
            self.named[name] = look_up(self.table, name)
            assert self.named[name].ino == number or not self.remembers_all

    def gone(self, name: str) -> None:
        inode = self.named.pop(name)
        self.table.detach([inode])
        self.removed.append(inode)
        if len(self.removed) > 4:
            self.forget(self.removed.pop(0))

    def forget(self, inode: Inode) -> None:
        self.table.forget(inode.nodeid, inode.nlookup)

    def check(self) -> None:
        living = [*self.named.values(), *self.removed]
        assert len({inode.ino for inode in living}) == len(living)


@pytest.mark.parametrize("most", [8, 32, 1 << 16])
def test_no_two_files_have_one_number(
    most: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Few records are remembered, or all; another process goes on with the same ones."""
    monkeypatch.setattr(file_numbers, "MOST_RECORDS", most)
    log = Journal(tmp_path / "journal")
    files = Files(log, remembers_all=most > 100)
    for step in range(2000):
        files.step()
        files.check()
        if step % 500 == 0:
            other = InodeTable("", Journal(None))
            restore_table(other, replay(tmp_path / "journal").state)
            assert list(other.numbers.records()) == list(files.table.numbers.records())
            assert other.next_id >= files.table.next_id
            for inode in (*files.named.values(), *files.removed):
                found = other.get(inode.nodeid)
                assert (found.ino, found.is_removed) == (inode.ino, inode.is_removed)
    log.close(remove=True)


FILE = Meta(stat.S_IFREG | 0o640, 1, 2)
DIRECTORY = Meta(stat.S_IFDIR | 0o750, 1, 2)
IDS = st.integers(0, (1 << 32) - 1)
NAMES = st.text("aZ0._- /\\\"'{}:,%+=ü漢\U0001f600", min_size=1)
ANYTHING = st.binary(max_size=40).map(lambda data: data.decode("latin-1"))
TOKENS = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1).map(lambda text: "x-" + text)
VALUES = st.text([chr(code) for code in range(0x20, 0x7F)], min_size=1).filter(
    lambda text: text == text.strip()
)
METAS = st.builds(
    Meta,
    mode=st.tuples(st.sampled_from([stat.S_IFREG, stat.S_IFLNK]), st.integers(0, PERMISSIONS)).map(
        lambda both: both[0] | both[1] & PERMISSIONS
    ),
    uid=IDS,
    gid=IDS,
    mtime_ns=st.none() | st.integers(-(10**18), 1 << 61),
    xattrs=st.dictionaries(NAMES, st.binary(), max_size=4).map(lambda one: tuple(one.items())),
    other=st.dictionaries(TOKENS, VALUES, max_size=3).map(lambda one: tuple(one.items())),
    form=st.sampled_from([Form.S3FS, Form.AWS, Form.S3FS | Form.AWS]),
)


@given(METAS)
def test_what_is_written_is_read_again(meta: Meta) -> None:
    assert object_metadata.read(meta.as_metadata(), FILE) == meta


@given(METAS)
def test_what_is_written_can_be_a_header(meta: Meta) -> None:
    for value in meta.as_metadata().values():
        assert value.isascii()
        assert value.isprintable()
        assert value == value.strip()


KEYS = ("mode", "uid", "gid", "mtime", "xattr", "file-permissions", "file-owner", "file-mtime")


@given(st.dictionaries(st.sampled_from(KEYS), ANYTHING))
def test_whatever_stands_there_is_read_as_something(metadata: dict[str, str]) -> None:
    found = object_metadata.read(metadata, FILE)
    assert stat.S_IFMT(found.mode) in (stat.S_IFREG, stat.S_IFLNK)
    assert not found.mode & 0o6000
    assert object_metadata.read(found.as_metadata(), FILE).mode == found.mode


@given(st.integers(0, 0o7777))
def test_decimal_and_octal_modes_are_distinguished(bits: int) -> None:
    for default, kind in ((FILE, stat.S_IFREG), (FILE, stat.S_IFLNK), (DIRECTORY, stat.S_IFDIR)):
        for text in (str(kind | bits), f"{kind | bits:o}", f"{kind | bits:07o}"):
            assert object_metadata.read({"mode": text}, default).mode == kind | bits & PERMISSIONS


@pytest.mark.parametrize(
    ("metadata", "mode"),
    [
        ({}, FILE.mode),
        ({"mode": ""}, FILE.mode),
        ({"mode": "-1"}, FILE.mode),
        ({"mode": "420"}, stat.S_IFREG | 0o644),  # without a type: decimal
        ({"mode": str(stat.S_IFIFO | 0o600)}, stat.S_IFREG | 0o600),
        ({"mode": str(stat.S_IFDIR | 0o700)}, stat.S_IFREG | 0o700),
        ({"mode": "9" * 30}, FILE.mode),
    ],
)
def test_a_file_is_a_file_or_a_link_whatever_its_mode_says(
    metadata: dict[str, str], mode: int
) -> None:
    assert object_metadata.read(metadata, FILE).mode == mode


@pytest.mark.parametrize(
    ("text", "mtime_ns"),
    [
        ("1500000000", 1_500_000_000 * 10**9),
        ("1500000000.5", 1_500_000_000 * 10**9 + 500_000_000),
        ("1400000000.987654321", 1_400_000_000_987_654_321),
        ("1400000000.9876543219", 1_400_000_000_987_654_321),
        ("-1.500000000", -1_500_000_000),
        ("-0.5", -500_000_000),
        ("2026-11-21T10:40:04Z", None),
        ("", None),
        ("nan", None),
        ("9" * 40, None),
        ("--" + "9" * 30, None),
        ("5.-5", None),
        ("1_000", None),
    ],
)
def test_a_time_is_seconds_with_or_without_a_fraction(text: str, mtime_ns: int | None) -> None:
    assert object_metadata.read({"mtime": text}, FILE).mtime_ns == mtime_ns


@pytest.mark.parametrize("text", ['{"user.\\ud800": "QQ=="}', '[[1, "QQ=="]]', "7", "null"])
def test_extended_attributes_that_make_no_sense_are_none(text: str) -> None:
    assert object_metadata.read({"xattr": quote(text)}, FILE).xattrs == ()


def test_times_that_will_be_wrong_are_not_kept() -> None:
    metadata = {"mode": "33188", "atime": "1", "ctime": "2", "fusefs-change": "0-1", "btime": "3"}
    assert object_metadata.read(metadata, FILE).other == (("btime", "3"),)


def test_what_cannot_be_sent_again_is_left_out() -> None:
    metadata = {"a": "größe", "b": " x", "c": "", "d": "x\ny", "e": "fine"}
    assert object_metadata.read(metadata, FILE).other == (("e", "fine"),)


def test_what_fits_is_counted_with_its_headers() -> None:
    # "x-amz-meta-" for each, the names, and what they say; and the token of the change.
    meta = Meta(stat.S_IFREG | 0o644, 0, 0, 0, other=(("note", "x"),))
    counted = sum(11 + len(name) + len(text) for name, text in meta.as_metadata().items())
    room = METADATA_LIMIT - counted - 11 - CHANGE_SIZE
    assert meta.changed(other=(("note", "x" * (1 + room)),)).fits
    assert not meta.changed(other=(("note", "x" * (2 + room)),)).fits
