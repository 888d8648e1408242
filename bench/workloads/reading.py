"""The workloads of the groups "data", "listing" and "recovery"."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from bench import pagecache
from bench.contenders.fusefs import Fusefs
from bench.dataset import LARGE, SMALL_SIZE
from bench.processes import Usage
from bench.programs.readers import PARTS_AT_A_TIME
from bench.session import MB, THREADS, Sample, Session, per_second
from bench.workloads import fio
from bench.workloads.fio import RandomRead

WARM_PASSES = 3
DROPPED_TIMES = 3
READERS = 8

KILLS = 5
MAPPED = RandomRead(1, engine="mmap")

# Maximum number of reads of a reader of the Python loop, which replaces fio if it is missing.
FALLBACK_READS = 100_000


Run = Callable[[Session], Sample]


def first_large(session: Session) -> Sample:
    before = session.contender.usage()
    session.make_cold()
    sample = session.fetch_large()
    cost = cost_per_gb(session, before, session.data.sizes.large)
    return replace(sample, also={f"large_{name}": value for name, value in cost.items()})


def cost_per_gb(session: Session, before: Usage | None, size: int) -> dict[str, float]:
    """Return the daemon's processor time since `before` for each 10^9 bytes, or {}."""
    after = session.contender.usage()
    if before is None or after is None:
        return {}
    return {"cpu": (after.cpu_s - before.cpu_s) / (size / MB / 1000)}


def faster_download(session: Session) -> Sample:
    """Download with obstore in parts and as one stream: the better rate is the floor."""
    in_parts = download(session, [LARGE], PARTS_AT_A_TIME)
    session.make_cold()
    target = session.contender.place.scratch / "download.bin"
    result = session.read_objects("download_stream", key=LARGE, target=str(target))
    rates = {"parts": in_parts.value, "stream": per_second(result, "bytes", MB).value}
    return Sample(max(rates.values()), dict(rates))


def download(session: Session, keys: Sequence[str], width: int) -> Sample:
    """Download objects to files with the bare client, in `width` simultaneous parts."""
    session.make_cold()
    target = session.contender.place.scratch / "download.bin"
    result = session.read_objects(
        "download_parts", keys=list(keys), target=str(target), width=width
    )
    return per_second(result, "bytes", MB)


def large_warm(session: Session, readers: int = 1) -> Sample:
    return session.read_large(readers=readers, passes=WARM_PASSES, warm_up=True)


def shares(session: Session, threads: int, *, is_warm: bool) -> Sample:
    """Read the large file with threads of one process, each with its share."""
    result = session.load(
        "shares",
        path=str(session.large),
        size=session.data.sizes.large,
        threads=threads,
        passes=WARM_PASSES if is_warm else 1,
        warm_up=is_warm,
    )
    return per_second(result, "bytes", MB)


def random_warm(session: Session, read: RandomRead) -> Sample:
    session.read_large()
    return _random_median(session, read)


def direct(session: Session) -> Sample:
    # O_DIRECT bypasses the mount's pages but not those of the daemon's own file: with that file in
    # memory, the daemon is measured and not the disk.
    pagecache.load(session.contender.cache)
    return _random_median(session, RandomRead(READERS, direct=True, repeat=100))


def _random_median(session: Session, read: RandomRead) -> Sample:
    return _median([random(session, read) for _ in range(WARM_PASSES)])


def random(session: Session, read: RandomRead) -> Sample:
    size = session.data.sizes.large
    if fio.is_installed():
        return Sample(*fio.reads_per_second(session.large, size, read, session.limit_s))
    reads = min(size // read.jobs // fio.PAGE * read.repeat, FALLBACK_READS)
    result = session.read(
        "random_pages",
        path=str(session.large),
        size=size,
        readers=read.jobs,
        reads=reads,
        limit_s=session.limit_s,
        direct=read.direct,
        mapped=read.engine == "mmap",
    )
    return per_second(result, "reads")


def dropped(measure: Run, times: int = DROPPED_TIMES) -> Run:
    """Make a run: the median of `times` measurements with the page cache dropped before each."""

    def run(session: Session) -> Sample:
        samples = []
        for _ in range(times):
            pagecache.drop()
            samples.append(measure(session))
        return _median(samples)

    return run


def _median(samples: Sequence[Sample]) -> Sample:
    rates = [sample.value for sample in samples]
    return Sample(statistics.median(rates), {"rates": rates, **samples[-1].detail})


def first_small(session: Session) -> Sample:
    before = session.contender.usage()
    session.make_cold()
    sample = session.fetch_small()
    cost = cost_per_gb(session, before, session.data.sizes.small * SMALL_SIZE)
    times = {name: sample.detail[name] for name in ("p50_ms", "p99_ms")}
    return replace(sample, also={f"small_{n}": value for n, value in (times | cost).items()})


def get_small(session: Session) -> Sample:
    session.make_cold()
    sample = session.get_small(THREADS)
    return replace(sample, also={f"small_{n}": sample.detail[n] for n in ("p50_ms", "p99_ms")})


def small_warm(session: Session, *, bare: bool = False) -> Sample:
    return session.read_small(passes=WARM_PASSES, warm_up=True, bare=bare)


def walk_cold(session: Session, folder: str) -> Sample:
    session.make_cold()
    return _walk(session, folder)


def walk_warm(session: Session, folder: str) -> Sample:
    _walk(session, folder)
    return _walk(session, folder, passes=WARM_PASSES)


def _walk(session: Session, folder: str, passes: int = 1) -> Sample:
    sizes = session.data.sizes
    result = session.read(
        "walk",
        root=str(session.contender.root / folder),
        files=sizes.small if folder == "small" else sizes.listed,
        passes=passes,
    )
    return per_second(result, "files")


def recovery(session: Session) -> Sample:
    """Kill the daemon some times, and each time ask for a name that was not looked up before."""
    assert isinstance(session.contender, Fusefs)
    _walk(session, "tree")
    answers, reads, killed = [], [], None
    for name in session.data.small_names()[:: session.data.sizes.small // KILLS][:KILLS]:
        killed = session.contender.wait_for_daemon(other_than=killed)
        result = session.read(
            "kill_and_ask", pid=killed, path=str(session.small / name), size=SMALL_SIZE
        )
        answers.append(result["answer_s"] * 1000)
        reads.append(result["read_s"] * 1000)
    session.contender.wait_for_daemon(other_than=killed)
    return Sample(statistics.median(answers), {"answers_ms": answers, "reads_ms": reads})
