"""The files that listings have shown so far, in the order of names: what readahead goes by."""

from __future__ import annotations

from collections.abc import Iterator

from fusefs.posix.directory.listings import Directories
from fusefs.posix.nodes import names
from fusefs.store.interface import ObjectInfo

# Names of a folder that are looked at for the next folder.
LOOKED_AT = 100


class KnownFiles:
    """A view of a mount's listings that asks the bucket for nothing."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories

    def files(self, prefix: str, behind: str) -> Iterator[ObjectInfo]:
        """The files of a folder: those behind a key, then those before it."""
        name = behind.removeprefix(prefix)
        position = names.position(name) if name else ""
        yield from self._between(prefix, position, None)
        if position:
            yield from self._between(prefix, "", position)

    def next_folder(self, prefix: str) -> str | None:
        """The prefix of the folder that follows in the parent's listing, if that is known."""
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
        """The files at positions in (start, stop], as far as they are known without a gap."""
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
