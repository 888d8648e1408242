"""A collector for prometheus_client, which requests all mounts' metrics at each scrape.

The daemons give the metrics that telemetry/metrics.py describes. This module adds the
label `volume`, and two metrics of its own:

    fusefs_volume_up{volume}                        1 if the mount answered, else 0
    fusefs_volume_pod_info{volume, namespace, pod}  1 for each pod that uses it

Metrics with unknown names, from daemons of another version, are passed on unchanged. A
malformed answer counts as no answer, and does not affect the other mounts. Scrapes
share no state, so any number of scrapes may run at once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from fusefs.exporter.queries import MALFORMED, MountAnswer, Target, query_all, samples_of
from fusefs.telemetry.metrics import METRICS

logger = logging.getLogger(__name__)

PREFIX = "fusefs_"
# The address for all addresses: on machines with IPv6, an IPv6 socket accepts IPv4 as well.
EVERY_ADDRESS = "::"
VOLUME = "volume"
# The names of the exporter's own metrics.
_OWN = ("volume_up", "volume_pod_info")
# The maximum number of samples of one mount; a daemon has some hundreds.
MOST_SAMPLES = 20_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FAMILIES: dict[str, Callable[..., Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


@dataclass(frozen=True, slots=True)
class _MetricOfMount:
    """One metric of one mount; `samples` are tuples of name, labels and value."""

    kind: str
    help: str
    samples: list[tuple[str, dict[str, str], float]]


_MetricsOfMount = dict[str, _MetricOfMount]


class MountCollector:
    """A collector of the metrics of the mounts that `targets()` returns at each scrape."""

    def __init__(
        self,
        targets: Callable[[], Iterable[Target]],
        query: Callable[[Iterable[Target]], Sequence[MountAnswer]] = query_all,
    ) -> None:
        self._targets = targets
        self._ask = query

    def describe(self) -> list[Metric]:
        """Return no metrics, so that registering the collector requests none from mounts."""
        return []

    def collect(self) -> Iterator[Metric]:
        answers = [_parsed(answer) for answer in self._ask(list(self._targets()))]
        up = GaugeMetricFamily(
            f"{PREFIX}volume_up", "Whether the mount's daemon answered.", labels=[VOLUME]
        )
        pods = GaugeMetricFamily(
            f"{PREFIX}volume_pod_info",
            "Always 1; the labels name a pod that uses the volume.",
            labels=[VOLUME, "namespace", "pod"],
        )
        for target, metrics in answers:
            volume = _text(target.volume)
            up.add_metric([volume], float(metrics is not None))
            for namespace, pod in target.pods:
                pods.add_metric([volume, namespace, pod], 1.0)
        yield up
        yield pods
        yield from _families(metrics for _, metrics in answers if metrics is not None)


def registry_of(*collectors: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


def serve(host: str, port: int, registry: CollectorRegistry) -> Callable[[], None]:
    """Start to serve the metrics over HTTP; return a function that ends the server.

    Each scrape has a thread of its own. Port 0 stands for any free port. Raises OSError if the
    address can't be used.
    """
    try:
        server, thread = start_http_server(port, host or EVERY_ADDRESS, registry)
    except OSError:
        if host:
            raise
        # Without IPv6 on this machine only IPv4 is served.
        server, thread = start_http_server(port, "0.0.0.0", registry)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end


def _families(mounts: Iterable[_MetricsOfMount]) -> Iterator[Metric]:
    kinds: dict[str, str] = {}
    families: dict[str, Metric] = {}
    for metrics in mounts:
        for name, metric in metrics.items():
            if name not in families:
                kinds[name] = metric.kind
                families[name] = _FAMILIES[metric.kind](
                    f"{PREFIX}{name.removesuffix('_total')}", metric.help
                )
            # Daemons of two versions may have one name for metrics of different types.
            if kinds[name] == metric.kind:
                for full, labels, value in metric.samples:
                    families[name].add_sample(full, labels, value)
    yield from families.values()


def _parsed(answer: MountAnswer) -> tuple[Target, _MetricsOfMount | None]:
    """Return an answer's target and metrics; None for missing or malformed metrics."""
    target = answer.target
    if answer.metrics is None:
        return target, None
    try:
        return target, _metrics_of(target.volume, answer.metrics)
    except MALFORMED:
        logger.warning("%s: its metrics are malformed", target.volume, exc_info=True)
        return target, None


def _metrics_of(volume: str, answer: Mapping[str, Any]) -> _MetricsOfMount:
    """Parse the metrics in one mount's answer; raise an error of the tuple MALFORMED if invalid."""
    metrics: _MetricsOfMount = {}
    remaining = MOST_SAMPLES
    for name, metric in answer.items():
        kind = metric["type"]
        if kind not in _FAMILIES or name.removesuffix("_total") in _OWN:
            continue
        known = METRICS.get(name)
        if known is not None and known.type != kind:  # differs in another version
            continue
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a metric")
        samples = list(samples_of(f"{PREFIX}{name}", metric))
        remaining -= len(samples)
        if remaining < 0:
            raise ValueError(f"there are more than {MOST_SAMPLES} samples")
        labelled = [(full, _with_volume(labels, volume), value) for full, labels, value in samples]
        about = str(metric["help"]).encode(errors="replace").decode()
        metrics[name] = _MetricOfMount(kind, about, labelled)
    return metrics


def _with_volume(labels: Mapping[str, str], volume: str) -> dict[str, str]:
    """Return a sample's labels with `volume`, in place of such a label from the mount."""
    # Prometheus' own labels begin with "__": with `__name__` a sample would be another metric's.
    if any(not _NAME.fullmatch(name) or name.startswith("__") for name in labels):
        raise ValueError(f"{labels} has other things than names of labels")
    return {name: _text(value) for name, value in {**labels, VOLUME: volume}.items()}


def _text(value: str) -> str:
    """Escape the bytes of a label's value that are not UTF-8; mountpoints may have such bytes."""
    return value.encode(errors="surrogateescape").decode(errors="backslashreplace")
