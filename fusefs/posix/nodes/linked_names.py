"""The names that a hard link has made one file's, until one of them changes.

A bucket has an object for each, with the same content and attributes. So they show
one inode number and count each other as links, as programs expect that look after
they have made a link (git, locks by link). The first change through one of them,
of content or attributes, parts it from the others: they get another number. What the
kernel has forgotten of such a file, or somebody else has replaced, is a file by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusefs.posix.nodes.inode import Inode

# Called with a node whose name is to have the number that is given, or (None) any other.
Number = Callable[["Inode", int | None], None]


class LinkedNames:
    """The nodes of one file's names. Belongs to the event loop.

    `give` gives a node another number; `changed` is called with each that looks different now.
    """

    __slots__ = ("_changed", "_give", "nodes")

    def __init__(
        self, nodes: Iterable[Inode], give: Number, changed: Callable[[Inode], None]
    ) -> None:
        self.nodes = set(nodes)
        self._give = give
        self._changed = changed
        for inode in self.nodes:
            inode.links = self

    def add(self, inode: Inode) -> None:
        """A file has one more name."""
        inode.links = self
        self.nodes.add(inode)
        self._note_changed()

    def replace(self, old: Inode, new: Inode) -> None:
        """A name has another node, of the same content."""
        self.nodes.discard(old)
        old.links = None
        self.nodes.add(new)
        new.links = self

    def leave(self, inode: Inode) -> None:
        """A name is not the file's any more."""
        self.nodes.discard(inode)
        inode.links = None
        self._note_changed()

    def part(self, inode: Inode) -> None:
        """A file changes under one of its names, which keeps the number."""
        self.leave(inode)
        self._changed(inode)
        number = None
        for other in self.nodes:
            self._give(other, number)
            number = other.ino

    def _note_changed(self) -> None:
        for inode in self.nodes:
            self._changed(inode)
        if len(self.nodes) == 1:
            (last,) = self.nodes
            last.links = None
