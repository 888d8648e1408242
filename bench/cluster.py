"""`python -m bench.cluster`: first reads through a cluster cache, compared with S3 alone.

Three ways are measured in rounds whose order rotates, each with an empty local cache and a new
mount: S3 alone; an empty cluster cache, which is filled by the reads; and a cluster cache that has
all data. The cluster cache is a SeaweedFS of a master, a filer with S3 gateway and three volume
servers on loopback; the source is a server behind the proxy of the profile `cloud`. Beside the
rates, the table shows the processor time of the daemon and of the cluster, and the share of the
bytes that came from the source. Cluster, server, proxy, daemon and reader share this machine's
processors, so filling a cluster cache costs twice here. After each way its bytes are compared with
the data set. It needs root and a real disk, as `python -m bench` does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench import dataset, pagecache, processes
from bench.bucket import Bucket
from bench.cloud.proxy import Distance, Proxy
from bench.contenders.contender import Native, Place
from bench.contenders.fusefs import Fusefs
from bench.dataset import LARGE, SMALL_SIZE, DataSet, Sizes
from bench.processes import BenchError
from bench.session import Session
from tests.support.servers.s3_server import S3Server, ServerError
from tests.support.servers.seaweed_cluster import REPLICATIONS, SeaweedCluster

MIB = 1024 * 1024
FILL_LIMIT_S = 900.0
S3_ALONE, EMPTY, WARM = "S3 alone", "empty", "warm"
# The distances of the source. A shared bucket in another region gives a connection a low rate, and
# refuses requests above its limit.
SOURCES = {
    "cloud": Distance(),
    "throttled": Distance(mb_s=20, requests_per_s=300),
    # What S3 allows for a prefix (5,500 GETs a second), shared by 55 nodes.
    "shared": Distance(mb_s=20, requests_per_s=100),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the comparison; `floors` are the least ratios to S3 alone, by way."""

    name: str
    unit: str
    floors: dict[str, float]


LARGE_ROW = Row("large", "MB/s", {EMPTY: 0.97, WARM: 3.0})
ROWS = (LARGE_ROW, Row("small", "files/s", {EMPTY: 0.97, WARM: 5.0}))


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of one way in one round.

    `cpu` and `cluster_cpu` are the processor time of the daemon and of the cluster, in seconds for
    10^9 bytes; `from_source` is the source's share of the bytes.
    """

    rate: float
    cpu: float
    cluster_cpu: float
    from_source: float


class Ways:
    """The ways to read the data set for the first time on a node."""

    def __init__(self, place: Place, data: DataSet, cluster: SeaweedCluster) -> None:
        self._place = place
        self._data = data
        self._cluster = cluster
        self._credentials = cluster.write_credentials(place.scratch / "cluster-credentials")
        self._key = place.scratch / "cluster-key"
        self._key.write_bytes(os.urandom(32))
        self._warm = ""
        native = Session(Native("native", place), data, 0, 0)
        self._digests = {row.name: digest(native, row) for row in ROWS}

    def fill(self) -> None:
        """Fill a cluster cache with all of the data set, for `warm` to read."""
        self._warm = self._cluster.new_bucket()
        mount = self._mount(self._warm)
        mount.start()
        try:
            command = [str(Path(sys.prefix) / "bin" / "fusefs"), "warm", "--wait", str(mount.root)]
            subprocess.run(command, check=True, capture_output=True, timeout=FILL_LIMIT_S)
        finally:
            mount.stop()

    def s3_alone(self, row: Row, seed: int) -> Reading:
        return self._read(row, seed, None)

    def empty(self, row: Row, seed: int) -> Reading:
        bucket = self._cluster.new_bucket()
        # For the first object the cluster creates the bucket's volumes, which takes time.
        client = self._cluster.client(retries={"total_max_attempts": 8})
        client.put_object(Bucket=bucket, Key="ready", Body=b"ready")
        try:
            return self._read(row, seed, bucket)
        finally:
            self._cluster.client().delete_bucket(Bucket=bucket)

    def warm(self, row: Row, seed: int) -> Reading:
        return self._read(row, seed, self._warm)

    def _mount(self, cache: str | None) -> Fusefs:
        options = ["--session", "kernel"]
        if cache is not None:
            options += ["--cluster-cache", f"s3://{cache}"]
            options += ["--cluster-cache-endpoint", self._cluster.endpoint_url]
            options += ["--cluster-cache-credentials", str(self._credentials)]
            options += ["--cluster-cache-key", str(self._key)]
        return Fusefs("fusefs", self._place, options)

    def _read(self, row: Row, seed: int, cache: str | None) -> Reading:
        mount = self._mount(cache)
        mount.start()
        session = Session(mount, self._data, 0, seed)
        try:
            session.make_cold()
            pagecache.load(self._cluster.data)
            # Finding the process takes a while, in which the reads' data would be stored.
            daemon = mount.wait_for_daemon(None)
            cpu, cluster_cpu, sent = _cpu(daemon), self._cluster_cpu(), _sent(session)
            sample = session.fetch_large() if row is LARGE_ROW else session.fetch_small()
            gigabytes = self._size(row) / 1e9
            cpu = (_cpu(daemon) - cpu) / gigabytes
            cluster_cpu = (self._cluster_cpu() - cluster_cpu) / gigabytes
            share = (_sent(session) - sent) / (gigabytes * 1e9)
            if digest(session, row) != self._digests[row.name]:
                raise BenchError(f"{row.name}: other bytes than in the bucket")
            return Reading(sample.value, cpu, cluster_cpu, share)
        finally:
            session.release()
            mount.stop()

    def _cluster_cpu(self) -> float:
        return sum(processes.usage_of(pid).cpu_s for pid in self._cluster.pids)

    def _size(self, row: Row) -> int:
        sizes = self._data.sizes
        return sizes.large if row is LARGE_ROW else sizes.small * SMALL_SIZE


def digest(session: Session, row: Row) -> str:
    """Return the SHA-256 of a row's files as the contender shows them."""
    return session.digest_object(LARGE) if row is LARGE_ROW else session.digest_small()


def _cpu(pid: int) -> float:
    return processes.usage_of(pid).cpu_s


def _sent(session: Session) -> int:
    assert session.proxy is not None
    return session.proxy.counts().sent_bytes


def measure(ways: Ways, rows: Sequence[Row], rounds: int) -> None:
    """Measure all rows in all ways, and print a table of medians."""
    table: dict[str, Callable[[Row, int], Reading]] = {
        S3_ALONE: ways.s3_alone,
        EMPTY: ways.empty,
        WARM: ways.warm,
    }
    for row in rows:
        readings: dict[str, list[Reading]] = {name: [] for name in table}
        for number in range(rounds):
            names = list(table)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                reading = table[name](row, number)
                readings[name].append(reading)
                print(f"{row.name:6} {name:9} {reading}", file=sys.stderr, flush=True)
        for name, measured in readings.items():
            print(_line(row, name, measured, readings[S3_ALONE]))


def _line(row: Row, name: str, measured: list[Reading], alone: list[Reading]) -> str:
    middle = {
        field: statistics.median(getattr(reading, field) for reading in measured)
        for field in ("rate", "cpu", "cluster_cpu", "from_source")
    }
    text = (
        f"{row.name:6} {name:9} {middle['rate']:8,.0f} {row.unit:8}"
        f" {middle['cpu']:5.2f} and {middle['cluster_cpu']:5.2f} s CPU/GB,"
        f" {middle['from_source']:4.2f} from the source"
    )
    if name == S3_ALONE:
        return text
    ratios = [one.rate / other.rate for one, other in zip(measured, alone, strict=True)]
    ratio, floor = statistics.median(ratios), row.floors[name]
    missed = "" if ratio >= floor else ", MISSED"
    return (
        f"{text}; {ratio:.2f} of S3 alone"
        f" ({min(ratios):.2f} to {max(ratios):.2f}; at least {floor:g}{missed})"
    )


def main() -> int:
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up, as for Ctrl-C
    try:
        _run(arguments)
    except (BenchError, ServerError) as error:
        print(f"bench.cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> None:
    base: Path = arguments.scratch.resolve()
    rows = [row for row in ROWS if row.name in arguments.rows.split(",")]
    sizes = Sizes(large=arguments.large * MIB, small=arguments.small, listed=0)
    with ExitStack() as cleanup:
        scratch = cleanup.enter_context(processes.scratch_directory(base, "cluster-"))
        server = cleanup.enter_context(S3Server(scratch / "server"))
        cluster = SeaweedCluster(scratch / "cluster", replication=arguments.replication)
        cleanup.enter_context(cluster)
        proxy = cleanup.enter_context(Proxy(server.endpoint_url, scratch, base / "build"))
        bucket = replace(Bucket.create(server), proxy=proxy)
        data = DataSet(scratch / "native", scratch / "names.json", sizes)
        _create(data, bucket)
        ways = Ways(Place(bucket, data.root, scratch), data, cluster)
        ways.fill()
        for source in arguments.source.split(","):
            proxy.set(SOURCES[source])
            print(f"source: {source}, {SOURCES[source]}; replication {arguments.replication}")
            measure(ways, rows, arguments.rounds)


def _create(data: DataSet, bucket: Bucket) -> None:
    """Make the files of the rows, and upload them to the bucket."""
    small = [f"small/{name}" for name in data.small_names()]
    dataset.write_random(data.root / LARGE, data.sizes.large)
    for name in small:
        dataset.write_random(data.root / name, SMALL_SIZE)
    data.names_file.write_text(json.dumps(data.small_names()))
    dataset.upload(bucket.store(), data.root, [LARGE, *small])
    bucket.age()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", type=int, default=1024, metavar="MIB", help="default 1024")
    parser.add_argument("--small", type=int, default=2000, metavar="N", help="default 2000")
    parser.add_argument(
        "--source",
        default=",".join(SOURCES),
        help="comma-separated: cloud (30 ms, 90 MB/s a connection), throttled (20 MB/s a"
        " connection and 300 requests/s), shared (100 requests/s); all of them",
    )
    parser.add_argument("--rows", default=",".join(row.name for row in ROWS))
    parser.add_argument("--replication", choices=REPLICATIONS, default="000")
    parser.add_argument("--scratch", type=Path, default=Path(".bench-scratch"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
