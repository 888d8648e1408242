"""`/metrics` of the driver: its calls, and on nodes the metrics of all volumes.

prometheus_client is imported only if metrics are wanted (--metrics), to save its memory in other
drivers.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fusefs.exporter.main import address_of

if TYPE_CHECKING:
    from prometheus_client import Histogram

# Calls take milliseconds, unless they wait for S3, for uploads or for warming.
CALL_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 110.0)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flag of `fusefs-csi node` and `controller`."""
    parser.add_argument(
        "--metrics",
        type=address_of,
        metavar="ADDRESS:PORT",
        help="serve metrics for Prometheus at http://ADDRESS:PORT/metrics; :PORT is all addresses",
    )


def call_times() -> Histogram:
    """Make the histogram of the durations of calls, by method and code."""
    from prometheus_client import Histogram

    return Histogram(
        "fusefs_csi_call_duration_seconds",
        "Time from a call's arrival to its answer.",
        ["method", "code"],
        buckets=CALL_BOUNDS,
        registry=None,
    )
