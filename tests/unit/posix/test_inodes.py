"""The node and handle tables: ids are never used twice, and go when the kernel forgets them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from fusefs.cache.cached_file import CacheFile
from fusefs.posix.journal.journal import Journal
from fusefs.posix.journal.records import replay
from fusefs.posix.nodes.handles import HandleTable
from fusefs.posix.nodes.inode_table import ROOT_ID, Inode, InodeTable
from fusefs.posix.restore.from_journal import restore_table
from fusefs.store.interface import ObjectInfo


def info(key: str, etag: str = '"1"', size: int = 3, mtime_ns: int = 5) -> ObjectInfo:
    return ObjectInfo(key, size, etag, mtime_ns)


@pytest.fixture
def table() -> InodeTable:
    return InodeTable("p/", Journal(None))


def known(table: InodeTable, name: str, etag: str = '"1"') -> Inode:
    inode = table.resolve(table.root, name, info("p/" + name, etag))
    table.count(inode, 0.0)
    return inode


def test_a_forget_of_too_many_is_no_error(table: InodeTable) -> None:
    inode = known(table, "a")
    table.forget(inode.nodeid, 1000)
    table.forget(inode.nodeid, 1)
    table.forget(12345, 1)
    table.forget(ROOT_ID, 1)
    assert len(table) == 1


def test_node_ids_may_be_the_inode_numbers() -> None:
    table = InodeTable("", Journal(None), ids_are_inos=True)
    old, new = known(table, "a"), known(table, "a", '"2"')
    assert old.nodeid == old.ino
    assert new.nodeid != old.nodeid


def test_closing_twice_is_no_error(table: InodeTable) -> None:
    inode, opened = known(table, "a"), HandleTable(Journal(None))
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
            assert logged[nodeid].parent == inode.parent.nodeid
        assert all(self.table.find(nodeid) is not None for nodeid in logged)

    @invariant()
    def another_process_knows_the_same(self) -> None:
        restored = InodeTable("", Journal(None))
        restore_table(restored, replay(self.path).state)
        for inode in restored.all():
            restored.drop_unknown(inode)
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
    table = InodeTable("p/", Journal(None), ids_are_inos=True)
    first = table.resolve(table.root, "a", info("p/a"))
    table.drop_unknown(first)
    second = known(table, "a")
    assert second.nodeid == first.nodeid
    table.drop_unknown(first)
    assert table.get(second.nodeid) is second
    assert table.root.children == {"a": second}
