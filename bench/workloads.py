"""What is measured, in the order in which it is run against one contender.

A workload is a function of a `Session` that returns a `Sample`. Workloads of
one group share a mount that began with an empty cache: "data" reads the large
object and the small files, "listing" walks the directories, "recovery" kills
the daemon; "writing" is told in writes.py and "starting" in csi/node/mount_process.py. What
a workload `needs` in the contender's cache is fetched if no earlier one did
it, so that any selection works.

The three states of the caches: *first*, nothing is local and the S3 server is
warm in memory; *dropped*, the contender's cache is complete and the page cache
is empty; *warm*, all of it was read just before in the same way.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bench import fio, pagecache, starting, writes
from bench.contenders import (
    CSI,
    KERNEL,
    LOCAL,
    NATIVE,
    NO_PASSTHROUGH,
    OBSTORE,
    PEERS,
    PYFUSE3,
    WRITABLE,
)
from bench.dataset import LARGE, SMALL_SIZE
from bench.fio import RandomRead
from bench.mounts import Fusefs
from bench.session import MB, THREADS, Sample, Session, per_second

WARM_PASSES = 3
DROPPED_TIMES = 3
READERS = 8

KILLS = 5
MAPPED = RandomRead(1, engine="mmap")

# Where fio is missing: how many reads a reader of the Python loop makes at most.
FALLBACK_READS = 100_000


Run = Callable[[Session], Sample]


def _first_large(session: Session) -> Sample:
    session.make_cold()
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


def _large_warm(session: Session, readers: int = 1) -> Sample:
    return session.read_large(readers=readers, passes=WARM_PASSES, warm_up=True)


def _random_warm(session: Session, read: RandomRead) -> Sample:
    session.read_large()
    return _random_median(session, read)


def _direct(session: Session) -> Sample:
    # O_DIRECT goes past the mount's pages but not past those of the daemon's
    # own file: with that in memory the daemon is measured, and not the disk.
    pagecache.load(session.contender.cache)
    return _random_median(session, RandomRead(READERS, direct=True, repeat=100))


def _random_median(session: Session, read: RandomRead) -> Sample:
    return _median([_random(session, read) for _ in range(WARM_PASSES)])


def _random(session: Session, read: RandomRead) -> Sample:
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


def _dropped(measure: Run, times: int = DROPPED_TIMES) -> Run:
    """The median of three, the page cache dropped before each: one alone is noisy."""

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


def _first_small(session: Session) -> Sample:
    session.make_cold()
    return session.fetch_small()


def _get_small(session: Session) -> Sample:
    session.make_cold()
    result = session.read_objects(
        "get_objects",
        prefix="small",
        names_file=str(session.data.names_file),
        size=SMALL_SIZE,
        threads=THREADS,
        seed=session.seed,
    )
    return per_second(result, "files")


def _small_warm(session: Session, *, bare: bool = False) -> Sample:
    return session.read_small(passes=WARM_PASSES, warm_up=True, bare=bare)


def _walk_cold(session: Session, folder: str) -> Sample:
    session.make_cold()
    return _walk(session, folder)


def _walk_warm(session: Session, folder: str) -> Sample:
    _walk(session, folder)
    return _walk(session, folder, passes=WARM_PASSES)


def _walk(session: Session, folder: str, passes: int = 1) -> Sample:
    result = session.read(
        "walk",
        root=str(session.contender.root / folder),
        files=session.data.sizes.listed,
        passes=passes,
    )
    return per_second(result, "files")


def _recovery(session: Session) -> Sample:
    """Kill the daemon some times, each time asking for a name that nobody asked for before."""
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


MOUNTS = (KERNEL, NO_PASSTHROUGH, PYFUSE3, *PEERS)
FILES = (NATIVE, *MOUNTS)
WRITERS = (KERNEL, *PEERS)


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the table.

    `who` is measured, by `run` or, if it is the bare client, by `run_bare`; `needs` comes
    first, untimed. `holds` workloads leave, or want, the handle of the first read open.
    `prepare` is run before the contender is started.
    """

    name: str
    title: str
    unit: str
    run: Run
    group: str = "data"
    who: Sequence[str] = FILES
    needs: Callable[[Session], None] | None = None
    run_bare: Run | None = None
    holds: bool = False
    prepare: Callable[[Session], None] | None = None

    def measure(self, session: Session) -> Sample:
        """Run it as its contender is to be measured."""
        if self.needs is not None:
            self.needs(session)
        if self.run_bare is not None and session.contender.name == OBSTORE:
            return self.run_bare(session)
        return self.run(session)


_first = partial(Workload, who=(OBSTORE, *MOUNTS, WRITABLE))
_large = partial(Workload, needs=Session.have_large)
_small = partial(Workload, needs=Session.have_small)
_listing = partial(Workload, group="listing", who=(*FILES, WRITABLE), unit="files/s")
_starting = partial(Workload, group="starting", who=(CSI,))
_writing = partial(Workload, group="writing")

WORKLOADS = (
    _first(
        "first_large",
        "first read of the large object, 1 MiB reads",
        "MB/s",
        _first_large,
        run_bare=_faster_download,
        holds=True,
    ),
    _large(
        "held_warm",
        "page cache warm, while a handle is open since before the first read",
        "MB/s",
        _large_warm,
        holds=True,
    ),
    _large(
        "reread_dropped",
        "read again, page cache dropped, one reader",
        "MB/s",
        _dropped(Session.read_large),
    ),
    _large("reread_warm", "read again, page cache warm, one reader", "MB/s", _large_warm),
    _large(
        "par8_dropped",
        "read again, page cache dropped, 8 readers",
        "MB/s",
        _dropped(partial(Session.read_large, readers=READERS)),
    ),
    _large(
        "par8_warm",
        "read again, page cache warm, 8 readers",
        "MB/s",
        partial(_large_warm, readers=READERS),
    ),
    # One pass over the pages takes a local disk a third of a second: too short.
    _large(
        "rand4k_warm",
        "4 KiB random reads, page cache warm, one job",
        "reads/s",
        partial(_random_warm, read=RandomRead(1, repeat=4)),
    ),
    # So many reads that one measurement is steady, and slow for some.
    _large(
        "rand4k_dropped8",
        "4 KiB random reads, page cache dropped, 8 jobs",
        "reads/s",
        _dropped(partial(_random, read=RandomRead(READERS)), times=1),
    ),
    _large(
        "mmap_warm",
        "mmap, scattered 4 KiB pages, page cache warm",
        "pages/s",
        partial(_random_warm, read=MAPPED),
    ),
    _large(
        "mmap_dropped",
        "mmap, scattered 4 KiB pages, page cache dropped",
        "pages/s",
        _dropped(partial(_random, read=MAPPED)),
    ),
    _large(
        "direct8",
        "4 KiB O_DIRECT reads that the daemon answers, 8 jobs",
        "reads/s",
        _direct,
        who=(NO_PASSTHROUGH, PYFUSE3),
    ),
    _first(
        "first_small",
        "first read of the 100 KiB files, 8 threads",
        "files/s",
        _first_small,
        run_bare=_get_small,
    ),
    _small(
        "small_dropped",
        "100 KiB files again, page cache dropped, 8 threads",
        "files/s",
        _dropped(Session.read_small),
    ),
    _small("small_warm", "100 KiB files again, page cache warm, 8 threads", "files/s", _small_warm),
    _small(
        "small_warm_bare",
        "the same by three system calls a file",
        "files/s",
        partial(_small_warm, bare=True),
    ),
    _listing(
        "tree_cold", "first walk with lstat, 100 folders", run=partial(_walk_cold, folder="tree")
    ),
    _listing(
        "tree_warm", "walk again with lstat, 100 folders", run=partial(_walk_warm, folder="tree")
    ),
    _listing(
        "flat_cold", "first walk with lstat, one folder", run=partial(_walk_cold, folder="flat")
    ),
    _listing(
        "flat_warm", "walk again with lstat, one folder", run=partial(_walk_warm, folder="flat")
    ),
    Workload(
        "recovery",
        "from SIGKILL of the daemon to its first answer",
        "ms",
        _recovery,
        group="recovery",
        who=(KERNEL,),
    ),
    _starting(
        "mount_first_byte",
        "from the mount's command to a file's first byte",
        "ms",
        starting.mount_first_byte,
        who=(KERNEL, WRITABLE, *PEERS),
    ),
    _starting(
        "publish_first_byte",
        "from NodePublishVolume to a file's first byte, new volume",
        "ms",
        starting.publish_first_byte,
    ),
    _starting(
        "publish_second_pod",
        "the same for a second pod of a volume",
        "ms",
        starting.publish_second_pod,
    ),
    _starting(
        "volume_mib", "memory of a volume's processes, of 5 volumes", "MiB", starting.volume_mib
    ),
    _writing(
        "write_large",
        "1 GiB in 1 MiB writes, until close has returned, in the bucket",
        "MB/s",
        writes.large,
        run_bare=writes.faster_put,
        who=(OBSTORE, *WRITERS),
    ),
    _writing(
        "write_local",
        "the same, safe on the local disk",
        "MB/s",
        writes.large_local,
        who=(NATIVE, LOCAL),
    ),
    _writing(
        "read_written",
        "first read of a file that was just written",
        "MB/s",
        writes.read_written,
        who=(NATIVE, *WRITERS),
    ),
    _writing(
        "read_written_again",
        "the same again",
        "MB/s",
        writes.read_written_again,
        who=(NATIVE, *WRITERS),
    ),
    _writing(
        "write_small",
        "64 KiB files written by 8 threads, in the bucket",
        "files/s",
        writes.small,
        run_bare=writes.put_small,
        who=(NATIVE, OBSTORE, LOCAL, *WRITERS),
    ),
    _writing(
        "tar_x",
        "tar -x of 3,000 files of 10 KiB",
        "files/s",
        writes.extract,
        prepare=writes.make_copied,
        who=(NATIVE, LOCAL, *WRITERS),
    ),
    _writing(
        "rsync_a",
        "rsync -a of 3,000 files of 10 KiB",
        "files/s",
        writes.synchronize,
        prepare=writes.make_copied,
        who=(NATIVE, LOCAL, *WRITERS),
    ),
    _writing(
        "rm_rf",
        "rm -rf of 5,000 files",
        "files/s",
        writes.remove,
        prepare=writes.put_removed,
        who=WRITERS,
    ),
    _writing(
        "rename_tree",
        "rename of a directory of 2,000 files, as mounts write them",
        "files/s",
        partial(writes.rename, folder=writes.DATED),
        prepare=partial(writes.put_renamed, folder=writes.DATED),
        who=WRITERS,
    ),
    _writing(
        "rename_foreign",
        "the same of files that don't say when they were modified",
        "files/s",
        partial(writes.rename, folder=writes.FOREIGN),
        prepare=partial(writes.put_renamed, folder=writes.FOREIGN),
        who=WRITERS,
    ),
)
# Each group has a mount of its own; a group that kills or starts daemons tells nothing of what
# they use.
READING = ("data", "listing", "recovery")
GROUPS = (*READING, "starting", "writing")
COUNTED_GROUPS = ("data", "listing")
