"""The workloads of the group "writing".

Before each workload, all earlier writes are synced to the disk. It counts only if the bucket has
exactly what was written, checked right after the writer has ended: for a peer whose close does not
wait for uploads, the row fails.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import pagecache
from bench.contenders.contender import Native
from bench.contenders.registry import LOCAL
from bench.processes import BenchError
from bench.session import MB, THREADS, Sample, Session, per_second

KIB = 1024
MIB = 1024 * KIB

LARGE = "written.bin"
CHECKPOINT = "checkpoint.bin"
FIRST = "first.bin"
FIRST_SIZE = 32 * MIB
SMALL = "written"
FEW = "few"
SMALL_SIZE = 64 * KIB
RENAMED_SIZE = 16 * KIB
COPIED_SIZE = 10 * KIB
REMOVED = "removed"
REMOVED_SIZE = 10 * KIB
WARM_PASSES = 3

# obstore's division of a file, as part size and simultaneous parts: its default, the fastest in
# trials with a near server, and a wider one for a distant server.
PUT_OPTIONS = {"default": (5 * MIB, 12), "best": (16 * MIB, 8), "wide": (8 * MIB, 32)}


def large(session: Session) -> Sample:
    sample = _write_large(session)
    _check_large(session, LARGE)
    return sample


def checkpoint(session: Session) -> Sample:
    size = session.data.sizes.checkpoint
    # A new mount has to look things up and import modules; a job's mount has long done so.
    _write_file(session, FIRST, FIRST_SIZE)
    (session.contender.root / FIRST).unlink()
    sample = _write_file(session, CHECKPOINT, size)
    _check_file(session, CHECKPOINT, size)
    return sample


def large_local(session: Session) -> Sample:
    is_native = isinstance(session.contender, Native)
    sample = _write_large(session, sync=is_native)
    if not is_native:
        session.contender.settle()
        _check_large(session, LARGE)
    return sample


def _write_large(session: Session, *, sync: bool = False) -> Sample:
    session.has_written = True
    return _write_file(session, LARGE, session.data.sizes.large, sync=sync)


def _write_file(session: Session, name: str, size: int, *, sync: bool = False) -> Sample:
    def write() -> dict[str, Any]:
        path = str(session.contender.root / name)
        return session.write("write_file", path=path, size=size, seed=session.seed, sync=sync)

    return _timed(session, write, "bytes", MB)


def faster_put(session: Session) -> Sample:
    """Upload with obstore's defaults and at several widths: the best rate is the floor."""
    _write_large(session)
    return _faster_put(session, LARGE, session.data.sizes.large)


def faster_put_checkpoint(session: Session) -> Sample:
    size = session.data.sizes.checkpoint
    _write_file(session, CHECKPOINT, size)
    return _faster_put(session, CHECKPOINT, size)


def _faster_put(session: Session, file: str, size: int) -> Sample:
    path = str(session.contender.root / file)
    rates = {}
    for name, (part_size, parts) in PUT_OPTIONS.items():
        pagecache.settle()
        result = session.write_objects(
            "put_file", path=path, key=name, part_size=part_size, parts_at_a_time=parts
        )
        rates[name] = per_second(result, "bytes", MB).value
        _check_file(session, name, size)
    return Sample(max(rates.values()), dict(rates))


def _check_large(session: Session, key: str) -> None:
    _check_file(session, key, session.data.sizes.large)


def _check_file(session: Session, key: str, size: int) -> None:
    session.at_server("check_file", key=key, size=size, seed=session.seed)


def read_written(session: Session) -> Sample:
    if not session.has_written:
        _write_large(session)
    return _read_large(session, passes=1)


def read_written_again(session: Session) -> Sample:
    if not session.has_written:
        _write_large(session)
        _read_large(session, passes=1)
    return _read_large(session, passes=WARM_PASSES)


def _read_large(session: Session, passes: int) -> Sample:
    path = str(session.contender.root / LARGE)
    result = session.read("sequential", path=path, size=session.data.sizes.large, passes=passes)
    return per_second(result, "bytes", MB)


def small(session: Session) -> Sample:
    return _write_files(session, SMALL, session.data.sizes.written)


def few(session: Session) -> Sample:
    return _write_files(session, FEW, session.data.sizes.few)


def _write_files(session: Session, folder: str, files: int) -> Sample:
    how = {"files": files, "size": SMALL_SIZE, "seed": session.seed}
    root = str(session.contender.root / folder)
    _forget_deleted()
    sample = _timed(
        session, lambda: session.write("write_files", root=root, threads=THREADS, **how), "files"
    )
    if session.contender.name == LOCAL:
        session.contender.settle()
    if not isinstance(session.contender, Native):
        session.at_server("check_files", prefix=folder, **how)
    return sample


def put_small(session: Session) -> Sample:
    return _put_files(session, SMALL, session.data.sizes.written)


def put_few(session: Session) -> Sample:
    return _put_files(session, FEW, session.data.sizes.few)


def _put_files(session: Session, folder: str, files: int) -> Sample:
    how = {"files": files, "size": SMALL_SIZE, "seed": session.seed}
    _forget_deleted()
    sample = _timed(
        session,
        lambda: session.write_objects("put_objects", prefix=folder, threads=THREADS, **how),
        "files",
    )
    session.at_server("check_files", prefix=folder, **how)
    return sample


def _forget_deleted() -> None:
    """Drop the caches, so that new files cost as much as on a disk without recent deletions.

    An ext4 without a journal looks at each inode that was deleted in the last minutes, and whose
    block is in memory, before it makes another one.
    """
    pagecache.drop()


# Files that mounts write have their modification time; other programs' mostly do not.
DATED, FOREIGN = "dated", "foreign"
_METADATA = {DATED: {"mtime": "1700000000.000000000"}, FOREIGN: {}}


def put_renamed(session: Session, folder: str) -> None:
    """Put the files that `rename` renames into the bucket; a running mount might not see them."""
    session.at_server(
        "put_objects",
        prefix=folder,
        files=session.data.sizes.renamed,
        size=RENAMED_SIZE,
        threads=THREADS,
        seed=session.seed,
        metadata=_METADATA[folder],
    )


def rename(session: Session, folder: str) -> Sample:
    files = session.data.sizes.renamed
    source, target = folder, f"{folder}-renamed"
    root = session.contender.root

    def write() -> dict[str, Any]:
        return session.write(
            "rename", source=str(root / source), target=str(root / target), files=files
        )

    sample = _timed(session, write, "files")
    session.at_server("check_renamed", source=source, target=target, files=files, size=RENAMED_SIZE)
    return sample


def make_copied(session: Session) -> None:
    """Make the local directory that `rsync` copies, and the archive that `tar` extracts."""
    source = _copied(session)
    if source.exists():
        shutil.rmtree(source)  # the previous contender's: contents differ per round
    session.write("make_files", root=str(source), archive=f"{source}.tar", **_copied_files(session))


def extract(session: Session) -> Sample:
    """Run `tar -x`, which sets each file's mode, owner and time as well."""
    command = ["tar", "-xf", f"{_copied(session)}.tar", "-C"]
    return _copy(session, command, "extracted")


def synchronize(session: Session) -> Sample:
    """Run `rsync -a`, which writes each file under another name, and renames it."""
    if shutil.which("rsync") is None:
        raise BenchError("rsync is not installed")
    return _copy(session, ["rsync", "-a", f"{_copied(session)}/"], "synchronized")


def _copy(session: Session, command: list[str], folder: str) -> Sample:
    target = session.contender.root / folder
    target.mkdir()
    _forget_deleted()
    files = session.data.sizes.copied
    sample = _timed(
        session, lambda: session.write("run", command=[*command, str(target)], files=files), "files"
    )
    if session.contender.name == LOCAL:
        session.contender.settle()
    if not isinstance(session.contender, Native):
        session.at_server("check_files", prefix=folder, **_copied_files(session))
        session.contender.settle()  # close does not wait for attributes
    return sample


def _copied(session: Session) -> Path:
    return session.contender.place.scratch / "copied"


def _copied_files(session: Session) -> dict[str, int]:
    return {"files": session.data.sizes.copied, "size": COPIED_SIZE, "seed": session.seed}


def put_removed(session: Session) -> None:
    """Put the files that `rm` removes into the bucket; a running mount might not see them."""
    session.at_server(
        "put_objects",
        prefix=REMOVED,
        files=session.data.sizes.removed,
        size=REMOVED_SIZE,
        threads=THREADS,
        seed=session.seed,
        metadata=_METADATA[DATED],
    )


def remove(session: Session) -> Sample:
    """Run `rm -rf` of a directory that a new mount has not seen before."""
    command = ["rm", "-rf", str(session.contender.root / REMOVED)]
    files = session.data.sizes.removed
    sample = _timed(session, lambda: session.write("run", command=command, files=files), "files")
    session.at_server("check_removed", prefix=REMOVED)
    return sample


def _timed(
    session: Session, write: Callable[[], dict[str, Any]], unit: str, scale: int = 1
) -> Sample:
    """Return the rate of a writer, with the processor time of the contender's processes."""
    pagecache.settle()
    before = session.contender.usage()
    sample = per_second(write(), unit, scale)
    after = session.contender.usage()
    if before is not None and after is not None:
        sample.detail["daemon_cpu_s"] = after.cpu_s - before.cpu_s
    return sample
