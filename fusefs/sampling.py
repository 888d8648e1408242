"""Plans of coming reads from Python: `fusefs.plan` and `PlannedSampler` (docs/guides/plan.md).

Both tell a mount the order in which its files will be read. They do so like `fusefs plan`, or, if
the mount is not registered, as in a pod, through its control file (fuse/control_files.py). The
module does not need torch: a sampler is any iterable of indices, or of batches of indices.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fusefs.cli import sync
from fusefs.cli.plan import Sender
from fusefs.launch.control import CommandError, ControlError
from fusefs.launch.registry import MountsError

logger = logging.getLogger("fusefs.sampling")

# A plan is extended with each epoch until it has this many entries; then a new plan begins.
MOST_ENTRIES = 4_000_000
Planned = str | os.PathLike[str] | tuple[str | os.PathLike[str], int, int]
CONTROL = ".fusefs/plan"  # relative to a mount's root
_FAILURES = (CommandError, ControlError, MountsError, OSError, ValueError)


def plan(paths: Sequence[Planned], *, reader: str = "") -> None:
    """Tell the mount of `paths` that a program will read these files in this order.

    A range of bytes is `(path, start, stop)`. The new plan replaces the last plan of the same
    `reader`. This name distinguishes readers with different orders, such as ranks.

    Raises:
        CommandError: the paths are in no mount, or in several.
        ControlError: the daemon does not answer, or refuses: it serves only its own user and root.
        OSError: the mount's control file can't be written.
    """
    _Reader(reader).give(paths, is_last=True)


class PlannedSampler:
    """A wrapper of a sampler of indices, or of batches, that tells the mount the sampler's order.

    `paths[index]` is the file of an index. The order of an epoch is sent to the mount when the
    epoch begins. If the sampler has `set_epoch`, like DistributedSampler, the order of the next
    epoch is known from the seed, and sent as well. All other attributes are those of the sampler,
    whose `rank` names the reader. Errors of planning are only logged.
    """

    def __init__(self, sampler: Any, paths: Sequence[str | os.PathLike[str]]) -> None:
        self._sampler = sampler
        self._paths = paths
        # A batch sampler has no `set_epoch`, but the sampler in it may have.
        inner = sampler if hasattr(sampler, "set_epoch") else getattr(sampler, "sampler", sampler)
        self._inner = inner
        self._reader = _Reader(str(getattr(inner, "rank", "")))
        self._told: list[Any] | None = None  # the order that was sent for the next epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(self._sampler)
        try:
            if order != self._told or self._reader.size > MOST_ENTRIES:
                self._reader = _Reader(self._reader.name)
                self._reader.give(self._files(order))
            self._told = self._next_order()
            if self._told is not None:
                self._reader.give(self._files(self._told))
        except _FAILURES as error:
            self._told = None
            logger.warning("the mount does not know the order of this epoch: %s", error)
        # DataLoader creates two iterators per epoch. A generator begins only at the first index.
        yield from order

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy has no `_sampler` yet
            raise AttributeError(name)
        return getattr(self.__dict__["_sampler"], name)

    def _files(self, order: Sequence[Any]) -> list[str | os.PathLike[str]]:
        batches = [each if isinstance(each, list | tuple) else [each] for each in order]
        return [self._paths[index] for batch in batches for index in batch]

    def _next_order(self) -> list[Any] | None:
        """Return the order of the next epoch; None if the sampler has no epochs."""
        inner, epoch = copy.copy(self._inner), getattr(self._inner, "epoch", None)
        if epoch is None or not hasattr(inner, "set_epoch"):
            return None
        inner.set_epoch(epoch + 1)
        if self._inner is self._sampler:
            return list(inner)
        batches = copy.copy(self._sampler)
        batches.sampler = inner
        return list(batches)


class _FileSender:
    """Writes a plan to the mount's control file: `add` takes a path, `flush` writes those added."""

    def __init__(self, path: Path, reader: str) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._reader = reader
        self.count = 0

    def add(self, path: str, span: str = "") -> None:
        if "\t" in path or "\n" in path:
            raise ValueError(f"{path!r} has a tab or a newline")
        self._file.write(f"{path}\t{self._reader}\t{span}\n")
        self.count += 1

    def flush(self, *, is_last: bool = False) -> None:
        self._file.flush()
        if is_last:
            self._file.close()


class _Reader:
    """Sends one reader's plan to the mount of its first path: `give` adds, `size` counts paths."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._sender: Sender | _FileSender | None = None
        self._root = ""

    @property
    def size(self) -> int:
        return self._sender.count if self._sender is not None else 0

    def give(self, paths: Sequence[Planned], *, is_last: bool = False) -> None:
        if not paths:
            return
        if self._sender is None:
            first = os.path.abspath(paths[0][0] if isinstance(paths[0], tuple) else paths[0])
            try:
                mountpoint, below = sync.find(Path(first))
            except CommandError:
                mounts = (at for at in Path(first).parents if (at / CONTROL).exists())
                directory = next(mounts, None)
                if directory is None:
                    raise
                self._root = f"{directory}/"
                self._sender = _FileSender(directory / CONTROL, self.name)
            else:
                self._root = first.removesuffix(below)  # as spelled in the paths
                self._sender = Sender(mountpoint, self.name)
        for each in paths:
            path, *span = each if isinstance(each, tuple) else (each,)
            absolute = os.path.abspath(path)
            if not absolute.startswith(self._root):
                raise CommandError(f"{path} is not in the mount {self._root}")
            self._sender.add(absolute[len(self._root) :], "-".join(map(str, span)))
        self._sender.flush(is_last=is_last)
