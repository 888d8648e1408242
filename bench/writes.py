"""The workloads of the group "writing".

Each starts with nothing that waits to be written to the disk, and counts only
if the bucket has exactly what was written, looked at right after the writer
has ended: for a peer whose close does not wait, the row fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench import pagecache
from bench.contenders import BareClient, Native
from bench.session import MB, THREADS, Sample, Session, per_second

KIB = 1024
MIB = 1024 * KIB

LARGE = "written.bin"
SMALL = "written"
SMALL_SIZE = 64 * KIB
RENAMED_SIZE = 16 * KIB
WARM_PASSES = 3

# How obstore cuts a file, part size and parts at a time: by itself, and the fastest in trials.
PUT_OPTIONS = {"default": (5 * MIB, 12), "best": (16 * MIB, 8)}


def large(session: Session) -> Sample:
    if isinstance(session.contender, BareClient):
        return _faster_put(session)
    sample = _write_large(session)
    _check_large(session, LARGE)
    return sample


def large_local(session: Session) -> Sample:
    is_native = isinstance(session.contender, Native)
    sample = _write_large(session, sync=is_native)
    if not is_native:
        session.contender.settle()
        _check_large(session, LARGE)
    return sample


def _write_large(session: Session, *, sync: bool = False) -> Sample:
    def write() -> dict[str, Any]:
        return session.write(
            "write_file", path=str(session.contender.root / LARGE),
            size=session.data.sizes.large, seed=session.seed, sync=sync,
        )  # fmt: skip

    session.has_written = True
    return _timed(session, write, "bytes", MB)


def _faster_put(session: Session) -> Sample:
    """obstore as it is and as it is at its best: the better of the two is the floor."""
    _write_large(session)
    path = str(session.contender.root / LARGE)
    rates = {}
    for name, (part_size, parts) in PUT_OPTIONS.items():
        pagecache.settle()
        result = session.write_objects(
            "put_file", path=path, key=name, part_size=part_size, parts_at_a_time=parts
        )
        rates[name] = per_second(result, "bytes", MB).value
        _check_large(session, name)
    return Sample(max(rates.values()), dict(rates))


def _check_large(session: Session, key: str) -> None:
    session.write_objects(
        "check_file", key=key, size=session.data.sizes.large, seed=session.seed
    )  # fmt: skip


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
    how = {"files": session.data.sizes.written, "size": SMALL_SIZE, "seed": session.seed}

    def write() -> dict[str, Any]:
        if isinstance(session.contender, BareClient):
            return session.write_objects("put_objects", prefix=SMALL, threads=THREADS, **how)
        root = str(session.contender.root / SMALL)
        return session.write("write_files", root=root, threads=THREADS, **how)

    sample = _timed(session, write, "files")
    if session.contender.name != "native":
        session.write_objects("check_files", prefix=SMALL, **how)
    return sample


# What mounts write say when they were modified; what other programs write mostly does not.
DATED = {"mtime": "1700000000.000000000"}


def put_dated(session: Session) -> None:
    """Put into the bucket what `rename_dated` renames; a mount that is up might not see it."""
    _put_renamed(session, "dated", DATED)


def put_foreign(session: Session) -> None:
    """The same for `rename_foreign`."""
    _put_renamed(session, "foreign", {})


def _put_renamed(session: Session, folder: str, metadata: dict[str, str]) -> None:
    session.write_objects(
        "put_objects", prefix=folder, files=session.data.sizes.renamed, size=RENAMED_SIZE,
        threads=THREADS, seed=session.seed, metadata=metadata,
    )  # fmt: skip


def rename_dated(session: Session) -> Sample:
    return _rename(session, "dated")


def rename_foreign(session: Session) -> Sample:
    return _rename(session, "foreign")


def _rename(session: Session, folder: str) -> Sample:
    files = session.data.sizes.renamed
    source, target = folder, f"{folder}-renamed"
    root = session.contender.root

    def write() -> dict[str, Any]:
        return session.write(
            "rename", source=str(root / source), target=str(root / target), files=files
        )

    sample = _timed(session, write, "files")
    session.write_objects(
        "check_renamed", source=source, target=target, files=files, size=RENAMED_SIZE
    )
    return sample


def _timed(
    session: Session, write: Callable[[], dict[str, Any]], unit: str, scale: int = 1
) -> Sample:
    """The rate of a writer, with the processor time of the contender's processes."""
    pagecache.settle()
    before = session.contender.usage()
    sample = per_second(write(), unit, scale)
    after = session.contender.usage()
    if before is not None and after is not None:
        sample.detail["daemon_cpu_s"] = after.cpu_s - before.cpu_s
    return sample
