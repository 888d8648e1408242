"""Gets the metrics of many mounts side by side, each within a deadline.

Each mount is sent its request from a thread of its own, so that one that hangs delays no other.
Where the system starts no more threads, the others are asked in turn. This module needs nothing
but the standard library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusefs.launch import control, registry
from fusefs.launch.control import MALFORMED as MALFORMED
from fusefs.launch.control import ControlError, NotAnsweringError

# Prometheus waits for 10 s by default. A daemon answers within milliseconds.
TIMEOUT_S = 2.0
# A node of Kubernetes has 100 mounts by default.
AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Target:
    """A mount, and what it is called: the value of the label `volume`.

    `pods` are the namespaces and names of the pods that use it.
    """

    volume: str
    socket: Path
    pods: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class MountAnswer:
    """The answer of a mount; `metrics` is None where it did not, for which `why` is the reason.

    There is a reason as well where the daemon has no metrics.
    """

    target: Target
    metrics: Mapping[str, Any] | None = None
    why: str = ""
    taken: float = field(default_factory=time.monotonic)


def target_at(mountpoint: Path, volume: str, pods: Iterable[tuple[str, str]] = ()) -> Target:
    """The mount at a mountpoint, be it there or not, under a name."""
    # Only the mountpoint decides where the socket is.
    registration = registry.Registration(str(mountpoint), "", 0, 0)
    return Target(volume, registration.socket, tuple(pods))


def mounts_of_user() -> list[Target]:
    """All mounts that this user has on record, named by their mountpoints."""
    return [Target(found.mountpoint, found.socket) for found in registry.all_mounts()]


def query_all(targets: Iterable[Target], timeout_s: float = TIMEOUT_S) -> list[MountAnswer]:
    """The answers of all mounts, in the order of `targets`. Blocks for little more than the time.

    Safe to call from several threads.
    """
    in_turn_until = time.monotonic() + timeout_s
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def begin(target: Target) -> Callable[[], MountAnswer]:
            try:
                return pool.submit(_ask, target, timeout_s).result
            except RuntimeError:  # of a control group, or of the user, there are too many threads
                answer = _ask(target, max(0.0, in_turn_until - time.monotonic()))
                return lambda: answer

        return [result() for result in [begin(target) for target in targets]]


def _ask(target: Target, timeout_s: float) -> MountAnswer:
    try:
        found = control.exchange(target.socket, {"command": "metrics"}, timeout_s)
        return MountAnswer(target, found["metrics"])
    except NotAnsweringError as error:
        return MountAnswer(target, why=str(error))
    except (ControlError, LookupError, TypeError) as error:
        # A daemon of a version without metrics answers, and serves.
        return MountAnswer(target, {}, str(error))


def samples_of(
    name: str, metric: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], float]]:
    """Prometheus' samples of a mount's metric: for a histogram one for each bucket, sum and count.

    Raises:
        MALFORMED: the metric has another form.
    """
    for sample in metric["samples"]:
        labels = sample["labels"]
        if metric["type"] != "histogram":
            yield name, labels, float(sample["value"])
            continue
        for bound, count in sample["buckets"]:
            yield f"{name}_bucket", {**labels, "le": bound}, float(count)
        yield f"{name}_sum", labels, float(sample["sum"])
        yield f"{name}_count", labels, float(sample["count"])
