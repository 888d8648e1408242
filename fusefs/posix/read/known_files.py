"""The files that listings have shown so far, in the order of names, for readahead."""

from __future__ import annotations

from collections.abc import Iterator

from fusefs.posix.directory.listings import Directories
from fusefs.posix.nodes import names
from fusefs.store.interface import ObjectInfo

# The most names of a folder that are searched for the next folder.
LOOKED_AT = 100


class KnownFiles:
    """A view of a mount's cached listings; it sends no requests."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories

    def files(self, prefix: str, behind: str) -> Iterator[ObjectInfo]:
        """Yield the known files of a folder: those behind the key `behind`, then the others."""
        name = behind.removeprefix(prefix)
        position = names.position(name) if name else ""
        yield from self._between(prefix, position, None)
        if position:
            yield from self._between(prefix, "", position)

    def next_folder(self, prefix: str) -> str | None:
        """The prefix of the next folder in the parent's listing; None if it is not known."""
        if not prefix:
            return None
        parent, _, name = prefix.rstrip("/").rpartition("/")
        parent = f"{parent}/" if parent else ""
        position = names.position(name)
        for segment in self._directories.get(parent).segments:
            if segment.stop is None or segment.stop > position:
                first = segment.after(position)
                for other in segment.ordered[first : first + LOOKED_AT]:
                    if segment.entries.get(other, True) is None:
                        return f"{parent}{other}/"
        return None

    def _between(self, prefix: str, start: str, stop: str | None) -> Iterator[ObjectInfo]:
        """Yield the files at positions in (start, stop], up to the first gap in the listings."""
        directory = self._directories.get(prefix)
        at = start
        while segment := directory.behind(at):
            for name in segment.ordered[segment.after(at) :]:
                if stop is not None and names.position(name) > stop:
                    return
                entry = segment.entries.get(name)
                if entry is not None:
                    yield entry
            if segment.stop is None or (stop is not None and segment.stop >= stop):
                return
            at = segment.stop
