"""What requests waited for while a test ran, in this process or in a mount's daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fusefs.launch.mount_requests import daemon_request
from fusefs.telemetry.stalls import CAUSES, STALLS
from tests.support.mounting import Mount

# Of the time that requests wait, the cause that a test makes has this share at least.
MOST = 0.8


@contextmanager
def mostly(cause: int, mount: Mount | None = None) -> Iterator[None]:
    """Requests wait for this cause meanwhile for the most part, and not for others."""
    before = waits(mount)
    yield
    waited = {name: seconds - before[name] for name, seconds in waits(mount).items()}
    total = waited.pop("any")
    shares = {name: round(seconds / total, 3) for name, seconds in waited.items()}
    assert shares.pop(CAUSES[cause]) >= MOST, shares
    assert sum(shares.values()) <= 1 - MOST + 0.01, shares


def waits(mount: Mount | None) -> Mapping[str, float]:
    """The waiting time by cause."""
    if mount is None:
        return dict(zip(CAUSES, STALLS.totals().wait, strict=True))
    metrics = daemon_request(mount.path, {"command": "metrics"}, 5.0)["metrics"]
    samples = metrics["wait_seconds_total"]["samples"]
    return {sample["labels"]["cause"]: sample["value"] for sample in samples}
