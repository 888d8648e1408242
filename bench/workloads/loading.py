"""The workloads that read like loaders of data and models, each on a new mount.

Shards by several readers, blocks of 128 KiB all over a large file, a mapped model, a burst of
readers, epochs over more data than the cache can hold, and a store that throttles.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.cloud.proxy import Distance, Proxy
from bench.contenders.registry import OBSTORE
from bench.dataset import LARGE, MIB, SHARDS, SMALL_SIZE
from bench.processes import BenchError
from bench.session import MB, THREADS, Sample, Session, per_second
from bench.workloads.reading import cost_per_gb, download

# As many simultaneous parts as fusefs has connections, so that the widths are the same.
SHARDS_WIDTH = 32
SCATTERED_READERS = 8
SCATTERED_READS = 100
BURST = 64
BURST_EACH = 10
EPOCHS = 4
# Room in a cache directory for other files than cached ones: catalogs and journals.
BESIDE_FILES = 16 * MIB
# Requests a second that the throttling store accepts, for all connections together.
THROTTLED_RATE = 300.0
THROTTLED_THREADS = 32
BESIDE_THREADS = 4


def first_shards(session: Session) -> Sample:
    """Read four files of a quarter of the large object's size, with a reader for each."""
    before = session.contender.usage()
    session.make_cold()
    result = session.load(
        "shards",
        paths=[str(session.contender.root / shard) for shard in SHARDS],
        size=session.data.sizes.large // len(SHARDS),
    )
    cost = cost_per_gb(session, before, result["bytes"])
    also = {f"shards_{name}": value for name, value in cost.items()}
    return replace(per_second(result, "bytes", MB), also=also)


def bare_shards(session: Session) -> Sample:
    return download(session, SHARDS, SHARDS_WIDTH)


def scattered(session: Session) -> Sample:
    session.make_cold()
    result = session.load(
        "scattered", path=str(session.large), size=session.data.sizes.large, **_scattered()
    )
    return per_second(result, "reads")


def bare_scattered(session: Session) -> Sample:
    session.make_cold()
    result = session.load_objects(
        "scattered_ranges", key=LARGE, size=session.data.sizes.large, **_scattered()
    )
    return per_second(result, "reads")


def _scattered() -> dict[str, int]:
    return {"readers": SCATTERED_READERS, "reads": SCATTERED_READS}


def first_mapped(session: Session) -> Sample:
    session.make_cold()
    size = session.data.sizes.large
    result = session.load("tensors", path=str(session.large), size=size, seed=session.seed)
    return per_second(result, "bytes", MB)


def burst(session: Session) -> Sample:
    session.make_cold()
    each = min(BURST_EACH, session.data.sizes.small // BURST)
    return per_second(session.load("burst", readers=BURST, each=each, **_small(session)), "files")


def bare_burst(session: Session) -> Sample:
    return bare_small(session, BURST)


def bare_small(session: Session, width: int) -> Sample:
    """Get the small objects with `width` threads of the bare client."""
    session.make_cold()
    return session.get_small(width)


def bare_large(session: Session, width: int) -> Sample:
    """Get the large object in `width` simultaneous parts with the bare client."""
    return download(session, [LARGE], width)


def _small(session: Session) -> dict[str, str | int]:
    return {
        "root": str(session.small),
        "names_file": str(session.data.names_file),
        "size": SMALL_SIZE,
    }


# --- more than the cache holds ---


def epochs(session: Session, order: str) -> Sample:
    """Measure the share of bytes, after the first epoch, that was served locally, in per cent.

    The cache may have half of the small files. `order` is "shuffled", anew for each epoch, "fixed",
    shuffled once, or "sequential", by name. The page cache is dropped before each epoch, as if the
    memory were small, too.
    """
    contender = session.contender
    total = session.data.sizes.small * SMALL_SIZE
    contender.stop()
    contender.cache_limit = total // 2
    fetched = []
    try:
        contender.start()
        for number in range(EPOCHS):
            session.make_cold()
            fetched.append(_fetched(session))
            session.read(
                "small_files",
                threads=THREADS,
                seed=number if order == "shuffled" else 0,
                is_shuffled=order != "sequential",
                **_small(session),
            )
        fetched.append(_fetched(session))
        kept = _disk_use(contender.cache)
        if kept > 1.1 * contender.cache_limit + BESIDE_FILES:
            raise BenchError(f"the cache has {kept} of {contender.cache_limit} bytes")
    finally:
        contender.stop()
        contender.cache_limit = None
        contender.start()
    missed = [(after - before) / total for before, after in itertools.pairwise(fetched)]
    return Sample(100 * (1 - statistics.mean(missed[1:])), {"missed": missed})


def _fetched(session: Session) -> int:
    """Return the bytes that have come from S3, as counted by the proxy."""
    return _proxy(session).counts().sent_bytes


def _disk_use(directory: Path) -> int:
    """Return the bytes that a directory's files take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


def _proxy(session: Session) -> Proxy:
    if session.proxy is None:
        raise BenchError("only where a proxy stands before the server")
    return session.proxy


# --- a store that throttles ---


def throttled(session: Session) -> Sample:
    """Make the first read of the small files while the store refuses requests above a rate.

    An error that the reader gets fails the row.
    """
    session.make_cold()
    with _throttled(session) as proxy:
        before = proxy.counts()
        if session.contender.name == OBSTORE:
            sample = session.get_small(THROTTLED_THREADS)
        else:
            how = {"threads": THROTTLED_THREADS, "seed": session.seed, **_small(session)}
            sample = per_second(session.read("small_files", **how), "files")
        after = proxy.counts()
    requests = after.requests - before.requests
    refused = after.refused - before.refused
    return replace(sample, also={"throttled_refused": 100 * refused / requests})


@contextmanager
def _throttled(session: Session) -> Iterator[Proxy]:
    proxy = _proxy(session)
    proxy.set(Distance(requests_per_s=THROTTLED_RATE))
    try:
        yield proxy
    finally:
        proxy.set(Distance())


def beside(session: Session, *, is_throttled: bool = False) -> Sample:
    """Measure the median first read of a small file while another program reads a large file."""
    return _beside(session, is_throttled, readers=1)


def alone(session: Session, *, is_throttled: bool = False) -> Sample:
    """Measure the same as `beside` while nothing else is read."""
    sample = _beside(session, is_throttled, readers=0)
    return sample if is_throttled else replace(sample, also={"alone_p99": sample.detail["p99_ms"]})


def beside_eight(session: Session) -> Sample:
    """Measure the 99th percentile of first reads while eight programs read large files."""
    sample = _beside(session, is_throttled=False, readers=8)
    return replace(sample, value=sample.detail["p99_ms"])


def _beside(session: Session, is_throttled: bool, readers: int) -> Sample:
    # The contender's cache must be empty, whatever was read before.
    session.contender.stop()
    session.contender.start()
    session.make_cold()
    arguments = {
        "threads": BESIDE_THREADS,
        "first": 0,
        "large": str(session.large),
        "large_size": session.data.sizes.large,
        "readers": readers,
    }
    if is_throttled:
        with _throttled(session):
            result = session.load("beside", **_small(session), **arguments)
    else:
        result = session.load("beside", **_small(session), **arguments)
    took = sorted(1000 * seconds for seconds in result["took_s"])
    detail = {"files": len(took), "large_s": result["large_s"]}
    detail["p99_ms"] = took[len(took) * 99 // 100]
    return Sample(statistics.median(took), detail)
