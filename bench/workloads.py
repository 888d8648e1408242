"""What is measured, in the order in which it is run against one contender.

A workload is a function of a `Session` that returns a `Sample`. Workloads of
one group share a mount that began with an empty cache: "data" reads the large
object and the small files, "listing" walks the directories, "recovery" kills
the daemon; "writing" is told in writes.py. `applies` tells for whom a workload
makes sense. A workload that needs its data in the contender's cache fetches it
if no earlier one did, so that any selection works.

The three states of the caches: *first*, nothing is local and the S3 server is
warm in memory; *dropped*, the contender's cache is complete and the page cache
is empty; *warm*, all of it was read just before in the same way.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import fio, pagecache, writes
from bench.contenders import LOCAL, PEERS, WRITABLE, BareClient, Contender, Fusefs
from bench.dataset import LARGE, SMALL_SIZE
from bench.fio import RandomRead
from bench.session import MB, THREADS, Sample, Session, per_second

WARM_PASSES = 3
DROPPED_TIMES = 3
READERS = 8

KILLS = 5
WRITING = "writing"
MAPPED = RandomRead(1, engine="mmap")

# Where fio is missing: how many reads a reader of the Python loop makes at most.
FALLBACK_READS = 100_000


Run = Callable[[Session], Sample]


def _first_large(session: Session) -> Sample:
    session.make_cold()
    if isinstance(session.contender, BareClient):
        return _faster_download(session)
    return session.fetch_large()


def _faster_download(session: Session) -> Sample:
    """obstore in parts and obstore as one stream: the better of the two is the floor."""
    target = session.contender.place.scratch / "download.bin"
    rates = {}
    for operation in ("download_parts", "download_stream"):
        session.make_cold()
        result = session.read_objects(operation, key=LARGE, target=str(target))
        target.unlink()
        rates[operation] = per_second(result, "bytes", MB).value
    return Sample(max(rates.values()), dict(rates))


def _large_dropped(readers: int) -> Run:
    def run(session: Session) -> Sample:
        _have_large(session)
        return _median_dropped(lambda: _read_large(session, readers=readers))

    return run


def _large_warm(readers: int) -> Run:
    def run(session: Session) -> Sample:
        _have_large(session)
        return _read_large(session, readers=readers, passes=WARM_PASSES, warm_up=True)

    return run


def _have_large(session: Session) -> None:
    if not session.has_large:
        session.fetch_large()


def _read_large(session: Session, **how: int) -> Sample:
    size = session.data.sizes.large
    result = session.read("sequential", path=str(session.large), size=size, **how)
    return per_second(result, "bytes", MB)


def _random_warm(read: RandomRead) -> Run:
    def run(session: Session) -> Sample:
        _have_large(session)
        _read_large(session)
        return _random_median(session, read)

    return run


def _random_dropped(session: Session) -> Sample:
    _have_large(session)
    pagecache.drop()  # so many reads that one measurement is steady, and slow for some
    return _random_once(session, RandomRead(READERS))


def _mapped_dropped(session: Session) -> Sample:
    _have_large(session)
    return _median_dropped(lambda: _random_once(session, MAPPED))


def _direct(session: Session) -> Sample:
    _have_large(session)
    # O_DIRECT goes past the mount's pages but not past those of the daemon's
    # own file: with that in memory the daemon is measured, and not the disk.
    pagecache.load(session.contender.cache)
    return _random_median(session, RandomRead(READERS, direct=True, repeat=100))


def _random_median(session: Session, read: RandomRead) -> Sample:
    return _median([_random_once(session, read) for _ in range(WARM_PASSES)])


def _random_once(session: Session, read: RandomRead) -> Sample:
    size = session.data.sizes.large
    if fio.is_installed():
        return Sample(*fio.reads_per_second(session.large, size, read, session.limit_s))
    reads = min(size // read.jobs // fio.PAGE * read.repeat, FALLBACK_READS)
    result = session.read(
        "random_pages", path=str(session.large), size=size, readers=read.jobs,
        reads=reads, limit_s=session.limit_s, direct=read.direct,
        mapped=read.engine == "mmap",
    )  # fmt: skip
    return per_second(result, "reads")


def _median_dropped(measure: Callable[[], Sample]) -> Sample:
    """The median of three, the page cache dropped before each: one alone is noisy."""
    samples = []
    for _ in range(DROPPED_TIMES):
        pagecache.drop()
        samples.append(measure())
    return _median(samples)


def _median(samples: Sequence[Sample]) -> Sample:
    rates = [sample.value for sample in samples]
    return Sample(statistics.median(rates), {"rates": rates, **samples[-1].detail})


def _first_small(session: Session) -> Sample:
    session.make_cold()
    if isinstance(session.contender, BareClient):
        result = session.read_objects(
            "get_objects", prefix="small", names_file=str(session.data.names_file),
            size=SMALL_SIZE, threads=THREADS, seed=session.seed,
        )  # fmt: skip
        return per_second(result, "files")
    return session.fetch_small()


def _small_dropped(session: Session) -> Sample:
    _have_small(session)
    return _median_dropped(session.read_small)


def _small_warm(*, bare: bool = False) -> Run:
    def run(session: Session) -> Sample:
        _have_small(session)
        return session.read_small(passes=WARM_PASSES, warm_up=True, bare=bare)

    return run


def _have_small(session: Session) -> None:
    if not session.has_small:
        session.fetch_small()


def _walk_cold(folder: str) -> Run:
    def run(session: Session) -> Sample:
        session.make_cold()
        return _walk(session, folder, passes=1)

    return run


def _walk_warm(folder: str) -> Run:
    def run(session: Session) -> Sample:
        _walk(session, folder, passes=1)
        return _walk(session, folder, passes=WARM_PASSES)

    return run


def _walk(session: Session, folder: str, passes: int) -> Sample:
    result = session.read(
        "walk", root=str(session.contender.root / folder),
        files=session.data.sizes.listed, passes=passes,
    )  # fmt: skip
    return per_second(result, "files")


def _recovery(session: Session) -> Sample:
    """Kill the daemon some times, each time asking for a name that nobody asked for before."""
    assert isinstance(session.contender, Fusefs)
    _walk(session, "tree", passes=1)
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


def _has_cache(contender: Contender) -> bool:
    """For all that is read as files: the mounts, and the bare disk."""
    return _is_listed(contender) and contender.name != WRITABLE


def _is_listed(contender: Contender) -> bool:
    return not isinstance(contender, BareClient) and contender.name != LOCAL


def _comes_from_s3(contender: Contender) -> bool:
    return contender.name not in ("native", LOCAL)


def _writes_to_s3(contender: Contender) -> bool:
    return contender.name in ("obstore", "fusefs-kernel", *PEERS)


def _writes_to_disk(contender: Contender) -> bool:
    return contender.name in ("native", LOCAL)


def _writes(contender: Contender) -> bool:
    return _writes_to_s3(contender) or contender.name == "native"


def _writes_files(contender: Contender) -> bool:
    return _writes(contender) and contender.name != "obstore"


def _renames(contender: Contender) -> bool:
    return _writes_to_s3(contender) and contender.is_mount


def _answers_every_read(contender: Contender) -> bool:
    return contender.name in ("fusefs-nopt", "fusefs-pyfuse3")


def _survives(contender: Contender) -> bool:
    return contender.name == "fusefs-kernel"


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the table.

    `holds` workloads leave, or want, the handle of the first read open.
    `prepare` is run before the contender is started.
    """

    name: str
    title: str
    unit: str
    run: Run
    group: str = "data"
    applies: Callable[[Contender], bool] = _has_cache
    holds: bool = False
    prepare: Callable[[Session], None] | None = None


WORKLOADS = (
    Workload("first_large", "first read of the large object, 1 MiB reads", "MB/s", _first_large,
             applies=_comes_from_s3, holds=True),
    Workload("held_warm", "page cache warm, while a handle is open since before the first read",
             "MB/s", _large_warm(1), holds=True),
    Workload("reread_dropped", "read again, page cache dropped, one reader", "MB/s",
             _large_dropped(1)),
    Workload("reread_warm", "read again, page cache warm, one reader", "MB/s", _large_warm(1)),
    Workload("par8_dropped", "read again, page cache dropped, 8 readers", "MB/s",
             _large_dropped(READERS)),
    Workload("par8_warm", "read again, page cache warm, 8 readers", "MB/s", _large_warm(READERS)),
    # One pass over the pages takes a local disk a third of a second: too short.
    Workload("rand4k_warm", "4 KiB random reads, page cache warm, one job", "reads/s",
             _random_warm(RandomRead(1, repeat=4))),
    Workload("rand4k_dropped8", "4 KiB random reads, page cache dropped, 8 jobs", "reads/s",
             _random_dropped),
    Workload("mmap_warm", "mmap, scattered 4 KiB pages, page cache warm", "pages/s",
             _random_warm(MAPPED)),
    Workload("mmap_dropped", "mmap, scattered 4 KiB pages, page cache dropped", "pages/s",
             _mapped_dropped),
    Workload("direct8", "4 KiB O_DIRECT reads that the daemon answers, 8 jobs", "reads/s",
             _direct, applies=_answers_every_read),
    Workload("first_small", "first read of the 100 KiB files, 8 threads", "files/s", _first_small,
             applies=_comes_from_s3),
    Workload("small_dropped", "100 KiB files again, page cache dropped, 8 threads", "files/s",
             _small_dropped),
    Workload("small_warm", "100 KiB files again, page cache warm, 8 threads", "files/s",
             _small_warm()),
    Workload("small_warm_bare", "the same by three system calls a file", "files/s",
             _small_warm(bare=True)),
    Workload("tree_cold", "first walk with lstat, 100 folders", "files/s", _walk_cold("tree"),
             group="listing", applies=_is_listed),
    Workload("tree_warm", "walk again with lstat, 100 folders", "files/s", _walk_warm("tree"),
             group="listing", applies=_is_listed),
    Workload("flat_cold", "first walk with lstat, one folder", "files/s", _walk_cold("flat"),
             group="listing", applies=_is_listed),
    Workload("flat_warm", "walk again with lstat, one folder", "files/s", _walk_warm("flat"),
             group="listing", applies=_is_listed),
    Workload("recovery", "from SIGKILL of the daemon to its first answer", "ms", _recovery,
             group="recovery", applies=_survives),
    Workload("write_large", "1 GiB in 1 MiB writes, until close has returned, in the bucket",
             "MB/s", writes.large, group=WRITING, applies=_writes_to_s3),
    Workload("write_local", "the same, safe on the local disk", "MB/s", writes.large_local,
             group=WRITING, applies=_writes_to_disk),
    Workload("read_written", "first read of a file that was just written", "MB/s",
             writes.read_written, group=WRITING, applies=_writes_files),
    Workload("read_written_again", "the same again", "MB/s", writes.read_written_again,
             group=WRITING, applies=_writes_files),
    Workload("write_small", "64 KiB files written by 8 threads, in the bucket", "files/s",
             writes.small, group=WRITING, applies=_writes),
    Workload("rename_tree", "rename of a directory of 2,000 files, as mounts write them",
             "files/s", writes.rename_dated, group=WRITING, applies=_renames,
             prepare=writes.put_dated),
    Workload("rename_foreign", "the same of files that don't say when they were modified",
             "files/s", writes.rename_foreign, group=WRITING, applies=_renames,
             prepare=writes.put_foreign),
)  # fmt: skip
# Each group has a mount of its own; the last one's daemons are killed, so what they use tells
# nothing.
GROUPS = ("data", "listing", "recovery", WRITING)
COUNTED_GROUPS = ("data", "listing")
