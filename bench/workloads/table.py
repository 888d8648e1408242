"""The workloads, in the order in which they run against one contender.

A workload is a function of a `Session` that returns a `Sample`. Workloads of one group share a
mount that began with an empty cache: "data" reads the large object and the small files, "listing"
walks the directories, "recovery" kills the daemon; the modules beside this one have the other
groups. A workload's `needs` fetches files into the contender's cache unless an earlier workload
did, so that any selection works.

The three states of the caches: *first*, nothing is local and the S3 server is warm in memory;
*dropped*, the contender's cache is complete and the page cache is empty; *warm*, all of it was read
just before in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bench.cloud.profile import CLOUD, PROFILES
from bench.cloud.profile import LOCAL as LOCAL_PROFILE
from bench.contenders.registry import (
    CSI,
    JUICEFS,
    KERNEL,
    LOCAL,
    NATIVE,
    NO_PASSTHROUGH,
    OBSTORE,
    PEERS,
    PYFUSE3,
    WRITABLE,
)
from bench.session import Sample, Session
from bench.workloads import crowds, loading, reading, starting, writing
from bench.workloads.fio import RandomRead
from bench.workloads.reading import Run

# The numbers of simultaneous readers, in rows that vary them.
THREADS = (1, 2, 4, 8, 16, 32)
WIDTHS = (8, 32, 64)
NEAR, FAR = (LOCAL_PROFILE,), (CLOUD,)

MOUNTS = (KERNEL, NO_PASSTHROUGH, PYFUSE3, *PEERS)
FILES = (NATIVE, *MOUNTS)
WRITERS = (KERNEL, *PEERS)


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the table.

    The contenders `who` are measured, by `run` or, for the bare client, by `run_bare`; `needs`
    comes first, untimed. Workloads with `holds` leave or need the handle of the first read open.
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
    profiles: Sequence[str] = PROFILES

    def measure(self, session: Session) -> Sample:
        """Run the workload in the way that suits its contender."""
        if self.needs is not None:
            self.needs(session)
        if self.run_bare is not None and session.contender.name == OBSTORE:
            return self.run_bare(session)
        return self.run(session)


_first = partial(Workload, who=(OBSTORE, *MOUNTS, WRITABLE))
_large = partial(Workload, needs=Session.have_large)
_small = partial(Workload, needs=Session.have_small)
_listing = partial(Workload, group="listing", who=(*FILES, WRITABLE), unit="files/s")
_throttling = partial(Workload, group="throttling", who=(KERNEL, *PEERS), profiles=FAR)
_crowd = partial(Workload, group="crowds", profiles=NEAR)
_starting = partial(Workload, group="starting", who=(CSI,))
_writing = partial(Workload, group="writing")

WORKLOADS = (
    _first(
        "first_large",
        "first read of the large object, 1 MiB reads",
        "MB/s",
        reading.first_large,
        run_bare=reading.faster_download,
        holds=True,
    ),
    _large(
        "held_warm",
        "page cache warm, while a handle is open since before the first read",
        "MB/s",
        reading.large_warm,
        holds=True,
    ),
    _large(
        "reread_dropped",
        "read again, page cache dropped, one reader",
        "MB/s",
        reading.dropped(Session.read_large),
    ),
    _large("reread_warm", "read again, page cache warm, one reader", "MB/s", reading.large_warm),
    _large(
        "par8_dropped",
        "read again, page cache dropped, 8 readers",
        "MB/s",
        reading.dropped(partial(Session.read_large, readers=reading.READERS)),
    ),
    _large(
        "par8_warm",
        "read again, page cache warm, 8 readers",
        "MB/s",
        partial(reading.large_warm, readers=reading.READERS),
    ),
    *(
        _large(
            f"threads{threads}_warm",
            f"read again, page cache warm, {threads} threads of one process",
            "MB/s",
            partial(reading.shares, threads=threads, is_warm=True),
            who=(NATIVE, KERNEL, *PEERS),
        )
        for threads in THREADS
    ),
    *(
        _large(
            f"threads{threads}_dropped",
            f"read again, page cache dropped, {threads} threads of one process",
            "MB/s",
            reading.dropped(partial(reading.shares, threads=threads, is_warm=False)),
            who=(NATIVE, KERNEL),
        )
        for threads in THREADS
    ),
    # One pass over the pages takes a local disk a third of a second: too short.
    _large(
        "rand4k_warm",
        "4 KiB random reads, page cache warm, one job",
        "reads/s",
        partial(reading.random_warm, read=RandomRead(1, repeat=4)),
    ),
    # Enough reads for a steady measurement, which takes slow contenders long.
    _large(
        "rand4k_dropped8",
        "4 KiB random reads, page cache dropped, 8 jobs",
        "reads/s",
        reading.dropped(partial(reading.random, read=RandomRead(reading.READERS)), times=1),
    ),
    _large(
        "mmap_warm",
        "mmap, scattered 4 KiB pages, page cache warm",
        "pages/s",
        partial(reading.random_warm, read=reading.MAPPED),
    ),
    _large(
        "mmap_dropped",
        "mmap, scattered 4 KiB pages, page cache dropped",
        "pages/s",
        reading.dropped(partial(reading.random, read=reading.MAPPED)),
    ),
    _large(
        "direct8",
        "4 KiB O_DIRECT reads that the daemon answers, 8 jobs",
        "reads/s",
        reading.direct,
        who=(NO_PASSTHROUGH, PYFUSE3),
    ),
    _first(
        "first_small",
        "first read of the 100 KiB files, 8 threads",
        "files/s",
        reading.first_small,
        run_bare=reading.get_small,
    ),
    *(
        Workload(
            f"bare_large{width}",
            f"the large object, {width} parts of 8 MiB at a time",
            "MB/s",
            partial(loading.bare_large, width=width),
            who=(OBSTORE,),
        )
        for width in WIDTHS
    ),
    *(
        Workload(
            f"bare_small{width}",
            f"the 100 KiB objects, {width} at a time",
            "files/s",
            partial(loading.bare_small, width=width),
            who=(OBSTORE,),
        )
        for width in WIDTHS
    ),
    _small(
        "small_dropped",
        "100 KiB files again, page cache dropped, 8 threads",
        "files/s",
        reading.dropped(Session.read_small),
        who=(*FILES, JUICEFS),
    ),
    _small(
        "small_warm",
        "100 KiB files again, page cache warm, 8 threads",
        "files/s",
        reading.small_warm,
        who=(*FILES, JUICEFS),
    ),
    _small(
        "small_warm_bare",
        "the same by three system calls a file",
        "files/s",
        partial(reading.small_warm, bare=True),
        who=(*FILES, JUICEFS),
    ),
    _first(
        "first_shards",
        "first read of four files of 256 MiB by four readers",
        "MB/s",
        loading.first_shards,
        run_bare=loading.bare_shards,
        group="shards",
    ),
    _first(
        "first_blocks",
        "first reads of 128 KiB all over the large file, 8 readers",
        "reads/s",
        loading.scattered,
        run_bare=loading.bare_scattered,
        group="blocks",
    ),
    _first(
        "first_mapped",
        "the large file mapped, its tensors in random order, first time",
        "MB/s",
        loading.first_mapped,
        group="mapped",
        who=MOUNTS,
    ),
    _first(
        "burst64",
        "64 readers that start together, first read of 10 files of 100 KiB each",
        "files/s",
        loading.burst,
        run_bare=loading.bare_burst,
        group="burst",
    ),
    *(
        Workload(
            f"epochs_{order}",
            f"served locally in epochs 2 to 4, half fits the cache, {order}",
            "%",
            partial(loading.epochs, order=order),
            group="epochs",
            who=(KERNEL, "rclone"),
            profiles=FAR,
        )
        for order in ("shuffled", "fixed", "sequential")
    ),
    _throttling(
        "throttled",
        "first read of the 100 KiB files, 32 threads, 503 above 300 requests/s",
        "files/s",
        loading.throttled,
        who=(OBSTORE, KERNEL, *PEERS),
    ),
    _throttling("alone", "a small file's first read, 4 threads, median", "ms", loading.alone),
    _throttling("beside", "the same while a large file is read", "ms", loading.beside),
    _throttling(
        "beside8_p99",
        "alone_p99 while eight programs read large files",
        "ms",
        loading.beside_eight,
    ),
    _throttling(
        "alone_throttled",
        "a small file's first read, 503 above 300 requests/s, median",
        "ms",
        partial(loading.alone, is_throttled=True),
    ),
    _throttling(
        "beside_throttled",
        "the same while a large file is read",
        "ms",
        partial(loading.beside, is_throttled=True),
    ),
    _listing(
        "folders_cold",
        "first walk with lstat, 2,000 files in 20 folders",
        run=partial(reading.walk_cold, folder="small"),
    ),
    _listing(
        "tree_cold",
        "first walk with lstat, 100 folders",
        run=partial(reading.walk_cold, folder="tree"),
    ),
    _listing(
        "tree_warm",
        "walk again with lstat, 100 folders",
        run=partial(reading.walk_warm, folder="tree"),
    ),
    _listing(
        "flat_cold",
        "first walk with lstat, one folder",
        run=partial(reading.walk_cold, folder="flat"),
    ),
    _listing(
        "flat_warm",
        "walk again with lstat, one folder",
        run=partial(reading.walk_warm, folder="flat"),
    ),
    *(
        _crowd(
            f"{name}{processes}",
            f"{title}, {processes} processes",
            unit,
            partial(run, processes=processes),
            who=who,
        )
        for name, title, unit, run, who in (
            (
                "opens",
                "open and close of cached 100 KiB files",
                "opens/s",
                crowds.opens,
                (*FILES, JUICEFS),
            ),
            (
                "served",
                "4 KiB O_DIRECT reads that the daemon answers",
                "reads/s",
                crowds.served,
                (NO_PASSTHROUGH, PYFUSE3, *PEERS),
            ),
            (
                "walks",
                "walk again with lstat, 100 folders",
                "files/s",
                crowds.walks,
                (*FILES, JUICEFS),
            ),
        )
        for processes in THREADS
    ),
    Workload(
        "recovery",
        "from SIGKILL of the daemon to its first answer",
        "ms",
        reading.recovery,
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
        "publish20",
        "20 new volumes published at once, to the last one's first byte",
        "s",
        starting.publish_at_once,
    ),
    _starting(
        "volume_mib", "memory of a volume's processes, of 5 volumes", "MiB", starting.volume_mib
    ),
    _writing(
        "write_large",
        "1 GiB in 1 MiB writes, until close has returned, in the bucket",
        "MB/s",
        writing.large,
        run_bare=writing.faster_put,
        who=(OBSTORE, *WRITERS),
    ),
    _writing(
        "write_256",
        "the same with 256 MiB",
        "MB/s",
        writing.checkpoint,
        run_bare=writing.faster_put_checkpoint,
        who=(OBSTORE, *WRITERS),
    ),
    _writing(
        "write_local",
        "the same, safe on the local disk",
        "MB/s",
        writing.large_local,
        who=(NATIVE, LOCAL),
    ),
    _writing(
        "read_written",
        "first read of a file that was just written",
        "MB/s",
        writing.read_written,
        who=(NATIVE, *WRITERS),
    ),
    _writing(
        "read_written_again",
        "the same again",
        "MB/s",
        writing.read_written_again,
        who=(NATIVE, *WRITERS),
    ),
    _writing(
        "write_small",
        "64 KiB files written by 8 threads, in the bucket",
        "files/s",
        writing.small,
        run_bare=writing.put_small,
        who=(NATIVE, OBSTORE, LOCAL, *WRITERS),
    ),
    _writing(
        "write_200",
        "200 files of 64 KiB written by 8 threads, in the bucket",
        "files/s",
        writing.few,
        run_bare=writing.put_few,
        who=(OBSTORE, *WRITERS),
    ),
    _writing(
        "tar_x",
        "tar -x of 3,000 files of 10 KiB",
        "files/s",
        writing.extract,
        prepare=writing.make_copied,
        who=(NATIVE, LOCAL, *WRITERS),
    ),
    _writing(
        "rsync_a",
        "rsync -a of 3,000 files of 10 KiB",
        "files/s",
        writing.synchronize,
        prepare=writing.make_copied,
        who=(NATIVE, LOCAL, *WRITERS),
    ),
    _writing(
        "rm_rf",
        "rm -rf of 5,000 files",
        "files/s",
        writing.remove,
        prepare=writing.put_removed,
        who=WRITERS,
    ),
    _writing(
        "rename_tree",
        "rename of a directory of 2,000 files, as mounts write them",
        "files/s",
        partial(writing.rename, folder=writing.DATED),
        prepare=partial(writing.put_renamed, folder=writing.DATED),
        who=WRITERS,
    ),
    _writing(
        "rename_foreign",
        "the same of files that don't say when they were modified",
        "files/s",
        partial(writing.rename, folder=writing.FOREIGN),
        prepare=partial(writing.put_renamed, folder=writing.FOREIGN),
        who=WRITERS,
    ),
)
# Each group has its own mount; groups that read need the data set, whose parts, named here, are
# compared before the measurements. Groups that kill or start daemons have no rows of resource
# usage.
READING = {
    "data": ("large", "small"),
    "shards": ("shards",),
    "blocks": ("large",),
    "mapped": ("large",),
    "burst": ("small",),
    "epochs": ("small",),
    "throttling": ("large", "small"),
    "listing": ("tree", "flat", "folders"),
    "crowds": ("large", "small", "tree"),
    "recovery": (),
}
GROUPS = (*READING, "starting", "writing")
COUNTED_GROUPS = ("data", "listing")
