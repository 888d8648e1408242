"""The metrics of one mount, as its daemon reports them over the control socket.

The request `{"command": "metrics"}` is answered with

    {"metrics": {NAME: {"type": TYPE, "help": TEXT, "samples": [SAMPLE, …]}, …}}

NAME is a key of `METRICS`, without the prefix `fusefs_`. All names of the table are included, in
its order, even without samples. TYPE is `counter`, `gauge` or `histogram`; units are seconds and
bytes. A SAMPLE is one of

    {"labels": {LABEL: TEXT, …}, "value": NUMBER}
    {"labels": {…}, "buckets": [[BOUND, COUNT], …], "sum": SECONDS, "count": COUNT}

with cumulative counts, bounds as text (the last is `+Inf`), and all labels of the table. The
exporter adds the name of the volume and whether it answers (`volume_up`, `volume_pod_info`).

Counters begin at 0 in a new daemon, which Prometheus handles as a reset. `daemon_restarts_total`
and `daemon_pause_seconds_total` come from the keeper; they are missing if it does not answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """The type, help text and labels of one metric."""

    type: str
    help: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    "volume_info": Metric(
        "gauge",
        "Always 1; the labels describe the mount.",
        ("source", "session", "passthrough", "version"),
    ),
    "requests_total": Metric(
        "counter",
        "Requests of programs that were answered (reads of passthrough files never come here).",
        ("operation", "outcome"),
    ),
    "request_duration_seconds": Metric(
        "histogram",
        "Time from reading a request to its answer (of those answered at once, one in 17).",
        ("operation", "outcome"),
    ),
    "opens_total": Metric("counter", "Opened files, by how they are read.", ("mode",)),
    "opened_passthrough_bytes_total": Metric(
        "counter", "Sizes of the files that were opened for passthrough; their reads are not seen."
    ),
    "read_bytes_total": Metric(
        "counter",
        "Bytes that programs read, by their origin: the cache disk, fetched (s3) from S3 or the"
        " cluster cache, or by the kernel from cached files (an estimate: each open for passthrough"
        " counts as one read of the whole file).",
        ("source",),
    ),
    "cache_bytes": Metric("gauge", "Bytes on the cache disk."),
    "cache_limit_bytes": Metric("gauge", "Bytes that the cache may use now."),
    "cache_allowed_bytes": Metric(
        "gauge", "Bytes that the cache could use if nothing else filled its disk."
    ),
    "cache_files": Metric("gauge", "Files in the cache."),
    "cache_evicted_bytes_total": Metric("counter", "Bytes evicted from the cache."),
    "cache_written_bytes_total": Metric("counter", "Bytes that were written to the cache's disk."),
    "prefetch_bytes_total": Metric(
        "counter", "Bytes fetched ahead: read (used), or evicted unread (wasted).", ("outcome",)
    ),
    "s3_requests_total": Metric("counter", "Requests sent to S3.", ("operation", "code")),
    "s3_request_duration_seconds": Metric(
        "histogram", "Time from sending a request to the end of its answer.", ("operation", "code")
    ),
    "s3_first_byte_seconds": Metric(
        "histogram", "Time from sending a request to its answer's start.", ("operation", "code")
    ),
    "s3_received_bytes_total": Metric("counter", "Bytes of objects received from S3."),
    "s3_sent_bytes_total": Metric("counter", "Bytes of objects sent to S3."),
    "s3_retries_total": Metric("counter", "Requests to S3 that were sent again after a failure."),
    "s3_throttled_total": Metric("counter", "Requests that S3 refused as one too many."),
    "s3_connections": Metric(
        "gauge", "Connections of the budget: allowed, in use, and requests that wait.", ("state",)
    ),
    "cluster_cache_lookups_total": Metric(
        "counter", "Blocks that were looked for in the cluster cache.", ("outcome",)
    ),
    "cluster_cache_fills_total": Metric(
        "counter", "Blocks that were to be stored in the cluster cache.", ("outcome",)
    ),
    "cluster_cache_request_duration_seconds": Metric(
        "histogram",
        "Time from sending a request to the cluster cache to the end of its answer.",
        ("operation", "code"),
    ),
    "cluster_cache_received_bytes_total": Metric(
        "counter", "Bytes of objects received from the cluster cache."
    ),
    "cluster_cache_sent_bytes_total": Metric(
        "counter", "Bytes of objects stored in the cluster cache."
    ),
    "cluster_cache_in_use": Metric("gauge", "1 if blocks are looked for in it, 0 if it is out."),
    "upload_pending_files": Metric("gauge", "Written files that are not in the bucket yet."),
    "upload_pending_bytes": Metric("gauge", "Their bytes."),
    "upload_oldest_pending_seconds": Metric(
        "gauge", "The age of the oldest of them that no program has open; 0 for none."
    ),
    "upload_failures_total": Metric("counter", "Uploads that failed; they are tried again."),
    "warm_done_bytes": Metric("gauge", "What jobs of fusefs warm under way have in the cache."),
    "warm_target_bytes": Metric("gauge", "What these jobs are to bring there, as far as listed."),
    "plan_ahead_seconds": Metric(
        "gauge", "How long readers of a fusefs plan can go on with what is there: the least of all."
    ),
    "plan_ahead_files": Metric("gauge", "The number of these files, of all readers."),
    "plan_ahead_bytes": Metric("gauge", "The size of these files."),
    "plan_late_seconds": Metric("gauge", "How long a reader's opens have been late: the longest."),
    "plan_opens_total": Metric(
        "counter",
        "Opens of planned files: there in_time, or late for the rate of S3, room or the position.",
        ("outcome",),
    ),
    "stalled_seconds_total": Metric(
        "counter", "Time in which at least one request of a program waited for this.", ("cause",)
    ),
    "wait_seconds_total": Metric(
        "counter", "Waiting time, added up over the requests that waited for this.", ("cause",)
    ),
    "daemon_restarts_total": Metric(
        "counter", "Daemons that died, and were replaced by another; upgrades do not count."
    ),
    "daemon_pause_seconds_total": Metric("counter", "Time without a daemon."),
    "daemon_loop_busy_seconds_total": Metric(
        "counter",
        "Processor time of the daemon's event loop, which is one thread, but for busy polling.",
    ),
    "daemon_cpu_seconds_total": Metric("counter", "Processor time of the daemon, all threads."),
    "daemon_resident_memory_bytes": Metric("gauge", "Resident memory of the daemon."),
}


def value(number: float, **labels: str) -> Sample:
    """Make a sample of a counter or a gauge."""
    return {"labels": labels, "value": number}


def answer(samples: Mapping[str, Iterable[Sample]]) -> dict[str, Any]:
    """Return the answer to the request "metrics", with the samples of each name."""
    return {
        "metrics": {
            name: {"type": metric.type, "help": metric.help, "samples": list(samples.get(name, ()))}
            for name, metric in METRICS.items()
        }
    }
