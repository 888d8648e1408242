"""Concurrent requests for the metrics of many mounts, each with a time-out.

A thread for each mount sends the request, so that a mount that hangs delays no other. If the
system starts no more threads, the remaining requests are sent one after the other. Apart from
fusefs, this module needs only the standard library.
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

# The time-out of a request: Prometheus waits for 10 s; a daemon answers within milliseconds.
TIMEOUT_S = 2.0
# The number of concurrent requests: a node of Kubernetes has at most 100 mounts by default.
AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Target:
    """A mount whose metrics are requested: its status socket, and its value of the label `volume`.

    `pods` are the namespaces and names of the pods that use the mount.
    """

    volume: str
    socket: Path
    pods: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class MountAnswer:
    """The result of a request: the `metrics`, or None without an answer, with the reason `why`.

    If the daemon answered without metrics, they are empty and `why` is the reason.
    """

    target: Target
    metrics: Mapping[str, Any] | None = None
    why: str = ""
    taken: float = field(default_factory=time.monotonic)


def target_at(mountpoint: Path, volume: str, pods: Iterable[tuple[str, str]] = ()) -> Target:
    """Return the target for a mountpoint, mounted or not, with the label `volume`."""
    # The socket's path depends only on the mountpoint.
    return Target(volume, registry.Registration(str(mountpoint), "", 0, 0).socket, tuple(pods))


def mounts_of_user() -> list[Target]:
    """Return the targets for all registered mounts of this user, labelled by mountpoints."""
    return [Target(found.mountpoint, found.socket) for found in registry.all_mounts()]


def query_all(targets: Iterable[Target], timeout_s: float = TIMEOUT_S) -> list[MountAnswer]:
    """Request the metrics of all targets; return the answers in the order of `targets`.

    Blocks for little more than `timeout_s`. Thread-safe.
    """
    in_turn_until = time.monotonic() + timeout_s
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def begin(target: Target) -> Callable[[], MountAnswer]:
            try:
                return pool.submit(_ask, target, timeout_s).result
            except RuntimeError:  # the limit of threads is reached
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
        # Empty metrics, not None: a daemon of a version without metrics has answered.
        return MountAnswer(target, {}, str(error))


def samples_of(
    name: str, metric: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], float]]:
    """Yield a metric's samples as (name, labels, value); for a histogram: buckets, sum and count.

    Raises:
        MALFORMED (a tuple of errors): `metric` lacks a field, or has one of another type.
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
