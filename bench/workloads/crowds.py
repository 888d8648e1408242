"""The workloads of many simultaneous processes, with the daemon's cost of each request.

Each row `opensN` has a row `opensN_cpu` beside it: the processor time of the daemon and its
children for one open and close, in microseconds; the other rows have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench import pagecache
from bench.processes import Usage
from bench.session import Sample, Session, per_second

# The total of all processes; a single process takes a second or two for it.
OPENS = 32_000
READS = 64_000


def opens(session: Session, processes: int) -> Sample:
    """Open and close cached small files without a read."""
    session.have_small()

    def run() -> dict[str, Any]:
        return session.crowd(
            "opens",
            root=str(session.small),
            names_file=str(session.data.names_file),
            processes=processes,
            each=OPENS // processes,
        )

    return _measured(session, run, "opens", f"opens{processes}_cpu")


def served(session: Session, processes: int) -> Sample:
    """Read 4 KiB blocks that the daemon answers, past the mount's pages."""
    session.have_large()
    pagecache.load(session.contender.cache)
    size = session.data.sizes.large

    def run() -> dict[str, Any]:
        return session.crowd(
            "pages",
            path=str(session.large),
            size=size,
            processes=processes,
            each=READS // processes,
        )

    return _measured(session, run, "reads", f"served{processes}_cpu")


def walks(session: Session, processes: int) -> Sample:
    """Walk with lstat over a tree that was walked just before."""
    files = session.data.sizes.listed

    def run() -> dict[str, Any]:
        root = str(session.contender.root / "tree")
        return session.crowd("walks", root=root, files=files, processes=processes)

    return _measured(session, run, "files", f"walks{processes}_cpu")


def _measured(session: Session, run: Callable[[], dict[str, Any]], what: str, cost: str) -> Sample:
    before = session.contender.usage()
    result = run()
    sample = per_second(result, what)
    used = _microseconds(before, session.contender.usage(), result[what])
    return sample if used is None else replace(sample, also={cost: used})


def _microseconds(before: Usage | None, after: Usage | None, count: int) -> float | None:
    """Return the processor time for each of `count` operations; None without a daemon."""
    if before is None or after is None:
        return None
    return (after.cpu_s - before.cpu_s) / count * 1e6
