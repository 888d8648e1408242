"""`/metrics` of the driver: its calls, and on nodes the metrics of all volumes.

prometheus_client is imported where metrics are wanted (--metrics), so that the
driver does without its memory elsewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from fusefs.api import MetricsTarget, SettingsError, address_of, serve_metrics

# Calls take milliseconds, or wait for S3, for uploads and for warming.
CALL_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 110.0)

# Called at the end of each call: method, name of the status, seconds.
OnCall = Callable[[str, str, float], None]
Targets = Callable[[], list[MetricsTarget]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flag of node and controller."""
    parser.add_argument(
        "--metrics",
        type=_address,
        metavar="ADDRESS:PORT",
        help="serve metrics for Prometheus at http://ADDRESS:PORT/metrics; :PORT is all addresses",
    )


def _address(text: str) -> tuple[str, int]:
    try:
        return address_of(text)
    except SettingsError as error:
        # The sentence begins with the option of `fusefs metrics`.
        raise argparse.ArgumentTypeError(str(error).removeprefix("--listen: ")) from None


def ignore(_method: str, _code: str, _seconds: float) -> None:
    """Where no metrics are served."""


class CallTimes:
    """How long calls took, by method and code: a collector of prometheus_client."""

    def __init__(self) -> None:
        from prometheus_client import Histogram

        self._times = Histogram(
            "fusefs_csi_call_duration_seconds",
            "Time from a call's arrival to its answer.",
            ["method", "code"],
            buckets=CALL_BOUNDS,
            registry=None,
        )

    def note(self, method: str, code: str, seconds: float) -> None:
        """A call has ended. For any thread."""
        self._times.labels(method, code).observe(seconds)

    def collect(self) -> Any:
        return self._times.collect()

    def describe(self) -> Any:
        return self._times.describe()


def serve(address: tuple[str, int], calls: CallTimes, targets: Targets) -> Callable[[], None]:
    """Serve from now on; the result ends that.

    Raises:
        OSError: the address can't be used.
    """
    return serve_metrics(address, targets, calls)
