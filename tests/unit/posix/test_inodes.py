"""The node and handle tables: ids are never used twice, and go when the kernel forgets them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from fusefs.cache.cached_file import CacheFile
from fusefs.posix.journal.journal import Journal, NoJournal
from fusefs.posix.journal.replay import replay
from fusefs.posix.journal.restore import restore_table
from fusefs.posix.nodes.handles import HandleTable
from fusefs.posix.nodes.inode_table import (
    FIRST_ID,
    ROOT_ID,
    Inode,
    InodeTable,
    Ownership,
)
from fusefs.store.interface import ObjectInfo

OWNER = Ownership(1000, 100, 0o640, 0o750)


def info(key: str, etag: str = '"1"', size: int = 3, mtime_ns: int = 5) -> ObjectInfo:
    return ObjectInfo(key, size, etag, mtime_ns)


@pytest.fixture
def table() -> InodeTable:
    return InodeTable("p/", NoJournal())


def known(table: InodeTable, name: str, etag: str = '"1"') -> Inode:
    inode = table.resolve(table.root, name, info("p/" + name, etag))
    table.count(inode, 0.0)
    return inode


def test_a_name_keeps_its_node_while_its_version_is_the_same(table: InodeTable) -> None:
    first = known(table, "a")
    assert table.resolve(table.root, "a", info("p/a", mtime_ns=99)) is first
    assert first.attributes(OWNER, 0).mtime_ns == 99


def test_a_changed_object_gets_a_new_node_and_keeps_its_inode_number(table: InodeTable) -> None:
    old, new = known(table, "a"), known(table, "a", '"2"')
    assert old.nodeid != new.nodeid
    assert old.ino == new.ino
    assert (old.is_current, new.is_current) == (False, True)
    assert table.get(old.nodeid) is old


def test_a_file_that_became_a_directory_is_another_node(table: InodeTable) -> None:
    file = known(table, "a")
    directory = table.resolve(table.root, "a", None)
    assert directory is not file
    assert directory.children is not None


def test_a_forgotten_node_is_unknown(table: InodeTable) -> None:
    inode = known(table, "a")
    table.count(inode, 0.0)
    table.forget(inode.nodeid, 1)
    assert table.get(inode.nodeid) is inode
    table.forget(inode.nodeid, 1)
    with pytest.raises(OSError, match="unknown node") as caught:
        table.get(inode.nodeid)
    assert caught.value.errno == errno.ESTALE


def test_a_forget_of_too_many_is_no_error(table: InodeTable) -> None:
    inode = known(table, "a")
    table.forget(inode.nodeid, 1000)
    table.forget(inode.nodeid, 1)
    table.forget(12345, 1)
    table.forget(ROOT_ID, 1)
    assert len(table) == 1


def test_a_node_id_is_never_used_again(table: InodeTable) -> None:
    seen = set()
    for _ in range(100):
        inode = known(table, "a")
        assert inode.nodeid >= FIRST_ID
        assert inode.nodeid not in seen
        seen.add(inode.nodeid)
        table.forget(inode.nodeid, 1)


def test_a_directory_stays_until_its_last_child_has_gone(table: InodeTable) -> None:
    directory = table.resolve(table.root, "d", None)
    table.count(directory, 0.0)
    child = table.resolve(directory, "a", info("p/d/a"))
    table.count(child, 0.0)
    table.forget(directory.nodeid, 1)
    assert table.key(child) == "p/d/a"
    assert table.key(directory) == "p/d/"
    table.forget(child.nodeid, 1)
    assert len(table) == 1
    assert table.root.children == {}


def test_an_old_node_goes_without_its_successor(table: InodeTable) -> None:
    old, new = known(table, "a"), known(table, "a", '"2"')
    table.forget(old.nodeid, 1)
    assert table.resolve(table.root, "a", info("p/a", '"2"')) is new


def test_the_key_of_a_deep_directory_has_all_its_parents(table: InodeTable) -> None:
    at = table.root
    for name in ("a", "b c", "ü"):
        at = table.resolve(at, name, None)
    assert table.key(at) == "p/a/b c/ü/"
    assert table.key(table.root) == "p/"


def test_attributes_are_the_object_s_and_the_owner_s(table: InodeTable) -> None:
    file = known(table, "a").attributes(OWNER, 77)
    assert (file.size, file.mtime_ns, file.mode, file.uid, file.gid) == (3, 5, 0o100640, 1000, 100)
    directory = table.root.attributes(OWNER, 77)
    assert (directory.mode, directory.mtime_ns) == (0o040750, 77)


def test_node_ids_may_be_the_inode_numbers() -> None:
    table = InodeTable("", NoJournal(), ids_are_inos=True)
    old, new = known(table, "a"), known(table, "a", '"2"')
    assert old.nodeid == old.ino
    assert new.nodeid != old.nodeid


def handles() -> HandleTable:
    return HandleTable(NoJournal())


def test_open_handles_are_counted_by_mode(table: InodeTable) -> None:
    inode, opened = known(table, "a"), handles()
    assert inode.info is not None
    file = CacheFile("x", 3)
    served = opened.open_file(inode, inode.info.version, file, 0, 0, 1)
    through = opened.open_file(inode, inode.info.version, file, 9, 0, 2)
    assert (inode.served, inode.passthrough) == (1, 1)
    opened.close_file(served.fh)
    opened.close_file(through.fh)
    assert not inode.is_open
    assert served.fh != through.fh


def test_closing_twice_is_no_error(table: InodeTable) -> None:
    inode, opened = known(table, "a"), handles()
    assert inode.info is not None
    handle = opened.open_file(inode, inode.info.version, CacheFile("x", 3), 0, 0, 1)
    assert opened.close_file(handle.fh) is handle
    assert opened.close_file(handle.fh) is None
    assert inode.served == 0
    directory = opened.open_directory(table.root, 1, 2)
    assert opened.directory(directory.fh) is directory
    opened.close_directory(directory.fh)
    assert opened.close_directory(directory.fh) is None
    with pytest.raises(OSError, match="unknown directory handle"):
        opened.directory(directory.fh)


NAMES = st.sampled_from(["a", "b", "c", "d"])


class Kernel(RuleBasedStateMachine):
    """The kernel's side: what it knows and has not forgotten must be known, and nothing more."""

    directories: Bundle[Inode] = Bundle("directories")
    references: Bundle[int] = Bundle("references")

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(f"/dev/shm/fusefs-test-journal-{id(self)}")
        self.log = Journal(self.path)
        self.table = InodeTable("", self.log)
        self.held: dict[int, int] = {}
        self.versions: dict[int, ObjectInfo | None] = {}

    def teardown(self) -> None:
        self.log.close(remove=True)

    def answered(self, inode: Inode) -> int:
        self.table.count(inode, 0.0)
        assert self.versions.setdefault(inode.nodeid, inode.info) == inode.info
        self.held[inode.nodeid] = self.held.get(inode.nodeid, 0) + 1
        return inode.nodeid

    @rule(target=references, name=NAMES, etag=st.sampled_from(["1", "2"]), data=st.data())
    def look_up_a_file(self, name: str, etag: str, data: st.DataObject) -> int:
        parent = self.some_directory(data)
        key = self.table.key(parent) + name
        return self.answered(self.table.resolve(parent, name, info(key, etag)))

    @rule(target=references, name=NAMES, data=st.data())
    def look_up_a_directory(self, name: str, data: st.DataObject) -> int:
        parent = self.some_directory(data)
        return self.answered(self.table.resolve(parent, name, None))

    @rule(target=references, reference=consumes(references))
    def forget(self, reference: int) -> object:
        # The kernel's dentries hold their parents.
        parents = {one.nodeid for nodeid in self.held for one in self.above(nodeid)}
        if self.held[reference] == 1 and reference in parents:
            return reference
        self.table.forget(reference, 1)
        self.held[reference] -= 1
        if not self.held[reference]:
            del self.held[reference]
        return multiple()

    @rule(reference=references)
    def mark_replaced(self, reference: int) -> None:
        self.table.mark_replaced(self.table.get(reference))

    def above(self, nodeid: int) -> Iterator[Inode]:
        at = self.table.get(nodeid).parent
        while at is not None:
            yield at
            at = at.parent

    def some_directory(self, data: st.DataObject) -> Inode:
        known = [self.table.get(nodeid) for nodeid in sorted(self.held)]
        usable = [one for one in known if one.children is not None]
        return data.draw(st.sampled_from([self.table.root, *usable]))

    @invariant()
    def what_is_held_is_known(self) -> None:
        for nodeid, count in self.held.items():
            assert self.table.get(nodeid).nlookup == count

    @invariant()
    def nothing_is_known_without_need(self) -> None:
        needed = {ROOT_ID}
        for nodeid in self.held:
            needed |= {nodeid, *(one.nodeid for one in self.above(nodeid))}
        assert {inode.nodeid for inode in self.table.all()} == needed

    @invariant()
    def the_log_tells_what_is_held(self) -> None:
        logged = replay(self.path).state.nodes
        for nodeid, count in self.held.items():
            inode = self.table.get(nodeid)
            assert logged[nodeid].nlookup >= count
            assert (logged[nodeid].ino, logged[nodeid].name) == (inode.ino, inode.name)
            assert logged[nodeid].info == inode.info
            assert inode.parent is not None
            assert logged[nodeid].parent == inode.parent.nodeid
        assert all(self.table.find(nodeid) is not None for nodeid in logged)

    @invariant()
    def another_process_knows_the_same(self) -> None:
        restored = InodeTable("", NoJournal())
        restore_table(restored, replay(self.path).state)
        restored.prune()
        assert {one.nodeid for one in restored.all()} == {one.nodeid for one in self.table.all()}
        assert restored.next_id >= self.table.next_id
        for inode in self.table.all():
            other = restored.get(inode.nodeid)
            assert (other.info, other.nlookup) == (inode.info, inode.nlookup)
            assert other.is_current == inode.is_current
            assert restored.key(other) == self.table.key(inode)
            if inode.children is not None and other.children is not None:
                ids = {name: child.nodeid for name, child in inode.children.items()}
                assert {name: child.nodeid for name, child in other.children.items()} == ids


TestKernel = Kernel.TestCase
TestKernel.settings = settings(stateful_step_count=30)


def test_an_inode_that_goes_twice_takes_no_other_with_it() -> None:
    table = InodeTable("p/", NoJournal(), ids_are_inos=True)
    first = table.resolve(table.root, "a", info("p/a"))
    table.drop_unknown(first)
    second = known(table, "a")
    assert second.nodeid == first.nodeid
    table.drop_unknown(first)
    assert table.get(second.nodeid) is second
    assert table.root.children == {"a": second}
