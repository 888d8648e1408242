"""Inode numbers: random changes of names give no two files one number, also where records go."""

import random
from pathlib import Path

import pytest

from fusefs.posix.journal.journal import Journal, NoJournal
from fusefs.posix.journal.replay import replay
from fusefs.posix.journal.restore import restore_table
from fusefs.posix.nodes import file_numbers
from fusefs.posix.nodes.inode_table import Inode, InodeTable
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
    whole, part = InodeTable("", NoJournal()), InodeTable("a/b/", NoJournal())
    directory = whole.resolve(whole.resolve(whole.root, "a", None), "b", None)
    assert look_up(whole, "file", directory).ino == look_up(part, "file").ino


def test_a_file_and_a_directory_of_one_name_have_different_numbers() -> None:
    table = InodeTable("", NoJournal())
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
    table = InodeTable("", NoJournal())
    first = look_up(table, "removed-0").ino
    table.forget(look_up(table, "removed-0").nodeid, 2)
    for number in range(200):
        remove(table, f"removed-{number}")
        assert len(dict(table.numbers.records())) <= 64
    assert len(dict(table.numbers.records())) >= 56
    assert look_up(table, "removed-0").ino == first
    assert look_up(table, "removed-144").ino < file_numbers.LEAST_HASH


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
            other = InodeTable("", NoJournal())
            restore_table(other, replay(tmp_path / "journal").state)
            assert list(other.numbers.records()) == list(files.table.numbers.records())
            assert other.next_id >= files.table.next_id
            for inode in (*files.named.values(), *files.removed):
                found = other.get(inode.nodeid)
                assert (found.ino, found.is_removed) == (inode.ino, inode.is_removed)
    log.close(remove=True)
