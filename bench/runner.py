"""A run: every contender in every round, in an order that rotates.

Before the rounds each contender is verified: its first read, its second read after the page cache
was dropped, and its listing must have the digests of the local files. A contender that fails is not
measured. Then each round gives each contender a mount with an empty cache per group of workloads. A
workload that fails is recorded with its reason and does not stop the others; a contender that
cannot be started loses that round's group.

Written data goes to a new bucket, which is removed at the end of the group; the writing workloads
themselves compare the bucket's contents.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench import pagecache
from bench.contenders.contender import Contender, Native, Place
from bench.dataset import LARGE, SHARDS, DataSet
from bench.processes import BenchError, Usage
from bench.session import Sample, Session
from bench.workloads.table import COUNTED_GROUPS, GROUPS, READING, Workload

MIB = 1024 * 1024
FAILURES = (BenchError, OSError, subprocess.SubprocessError, ValueError)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of one mount: the resources of its daemon, and its S3 requests.

    `connections` is the highest number of open connections to the proxy, if there is one.
    """

    usage: Usage | None
    requests: dict[str, int]
    connections: int | None


@dataclass(slots=True)
class Results:
    """All measurements; `samples[row][contender][round]`, without the rounds that failed."""

    profile: str
    samples: dict[str, dict[str, dict[int, Sample]]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def add(self, row: str, contender: str, number: int, sample: Sample) -> None:
        self.samples.setdefault(row, {}).setdefault(contender, {})[number] = sample


class Runner:
    """Runs workloads over contenders and collects the measurements in `results`."""

    def __init__(
        self, profile: str, workloads: Sequence[Workload], data: DataSet, limit_s: float
    ) -> None:
        self.results = Results(profile)
        self._workloads = workloads
        self._data = data
        self._limit_s = limit_s
        self._begun = time.monotonic()

    def run(self, place: Place, contenders: Sequence[Contender], rounds: int) -> None:
        expected = self._digests(
            self._session(Native("native", place), 0), self._parts(self._workloads)
        )
        trusted = [one for one in contenders if self._is_right(one, expected)]
        for number in range(rounds):
            shift = number % max(len(trusted), 1)
            for contender in trusted[shift:] + trusted[:shift]:
                self._measure(contender, number)

    def _of(self, contender: Contender) -> list[Workload]:
        return [workload for workload in self._workloads if contender.row_name in workload.who]

    def _is_right(self, contender: Contender, expected: dict[str, str]) -> bool:
        """True if first and second reads give the right bytes; an error is recorded if not."""
        parts = self._parts(self._of(contender))
        if not parts:
            return True

        def verify(session: Session) -> None:
            for attempt in ("first read", "read again"):
                found = self._digests(session, parts)
                wrong = [name for name in found if found[name] != expected[name]]
                if wrong:
                    raise BenchError(f"{attempt}: wrong content of {', '.join(wrong)}")
                pagecache.drop()

        right = self._with_session(contender, "verification", 0, verify)
        self._say(f"{contender.name:15} {'verified' if right else 'NOT MEASURED'}")
        return right

    def _measure(self, contender: Contender, number: int) -> None:
        """Measure one round of one contender: each group of workloads on a new mount."""
        costs: list[Costs] = []
        for group in GROUPS:
            chosen = [w for w in self._of(contender) if w.group == group]
            if not chosen:
                continue
            use = partial(self._run_all, number=number, chosen=chosen, costs=costs)
            what = f"round {number + 1} {group}"
            # Also those of other contenders' rows: the server then has the same history for all.
            prepare = [w.prepare for w in self._workloads if w.group == group and w.prepare]
            if group != "writing":
                self._with_session(contender, what, number, use, prepare)
                continue
            bucket = contender.place.bucket.another()
            try:
                self._with_session(contender.writing_to(bucket), what, number, use, prepare)
            finally:
                bucket.remove()
        for row, value in _total(costs).items():
            self.results.add(row, contender.name, number, Sample(value, {}))

    def _run_all(
        self, session: Session, number: int, chosen: Sequence[Workload], costs: list[Costs]
    ) -> None:
        if session.proxy is not None:
            session.proxy.counts()  # resets the highest number of connections
        for workload in chosen:
            if not workload.holds:
                session.release()
            self._run_one(workload, session, number)
        if chosen[0].group in COUNTED_GROUPS:
            connections = None if session.proxy is None else session.proxy.counts().most_open
            costs.append(
                Costs(session.contender.usage(), session.contender.requests(), connections)
            )

    def _run_one(self, workload: Workload, session: Session, number: int) -> None:
        name = session.contender.name
        try:
            sample = workload.measure(session)
        except FAILURES as error:
            self._fail(f"{name} round {number + 1} {workload.name}: {error}")
            return
        self.results.add(workload.name, name, number, sample)
        for row, value in sample.also.items():
            self.results.add(row, name, number, Sample(value, {}))
        self._say(f"{name:15} {workload.name:16} {sample.value:12,.0f} {workload.unit}")

    def _with_session(
        self,
        contender: Contender,
        what: str,
        seed: int,
        use: Callable[[Session], None],
        prepare: Sequence[Callable[[Session], None]] = (),
    ) -> bool:
        """Start, use and stop the contender; if any step fails, record it and return False."""
        session = self._session(contender, seed)
        try:
            try:
                for each in prepare:
                    each(session)
                contender.start()
                use(session)
            finally:
                try:
                    session.release()
                finally:
                    contender.stop()
        except FAILURES as error:
            self._fail(f"{contender.name} {what}: {error}")
            return False
        return True

    def _session(self, contender: Contender, seed: int) -> Session:
        return Session(contender, self._data, self._limit_s, seed)

    def _parts(self, workloads: Sequence[Workload]) -> set[str]:
        """Return the parts of the data set that workloads read."""
        return {part for workload in workloads for part in READING.get(workload.group, ())}

    def _digests(self, session: Session, parts: set[str]) -> dict[str, str]:
        """Return the digest of each of the parts; only mounts have listings."""
        by_part: dict[str, Callable[[], str]] = {
            "large": lambda: session.digest_object(LARGE),
            "shards": lambda: "".join(map(session.digest_object, SHARDS)),
            "small": session.digest_small,
            "tree": lambda: session.digest_listing("tree"),
            "flat": lambda: session.digest_listing("flat"),
            "folders": lambda: session.digest_listing("small"),
        }
        return {part: by_part[part]() for part in sorted(parts)}

    def _fail(self, message: str) -> None:
        self.results.errors.append(message)
        self._say(f"FAILED {message}")

    def _say(self, message: str) -> None:
        print(
            f"{time.monotonic() - self._begun:6.0f} s  {self.results.profile:5}  {message}",
            file=sys.stderr,
            flush=True,
        )


def _total(costs: Sequence[Costs]) -> dict[str, float]:
    """Add up the rows of a round's mounts: the highest peak, the sum of the others."""
    rows: dict[str, float] = {}
    usages = [cost.usage for cost in costs if cost.usage is not None]
    if usages:
        rows["rss_mib"] = max(usage.peak_rss_bytes for usage in usages) / MIB
        rows["cpu_s"] = sum(usage.cpu_s for usage in usages)
    connections = [cost.connections for cost in costs if cost.connections is not None]
    if connections:
        rows["connections"] = max(connections)
    for cost in costs:
        for name, count in cost.requests.items():
            rows[f"s3_{name}"] = rows.get(f"s3_{name}", 0) + count
    return rows
