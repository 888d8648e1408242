"""A collector for prometheus_client: at each scrape it gets the metrics of all mounts.

The values come from the daemons (telemetry/metrics.py describes them); here they
get the label `volume`, and beside them stand

    fusefs_volume_up{volume}                        1 if the mount answered, else 0
    fusefs_volume_pod_info{volume, namespace, pod}  1 for each pod that uses it

A name that a daemon of another version reports is passed on as it is. Nothing is
kept between scrapes, so any number of them may run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from fusefs.exporter.asking import Answer, Target, ask_all

PREFIX = "fusefs_"
VOLUME = "volume"
_FAMILIES: dict[str, Callable[..., Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class MountCollector:
    """Collects the metrics of the mounts that `targets` finds at each scrape."""

    def __init__(
        self,
        targets: Callable[[], Iterable[Target]],
        ask: Callable[[Iterable[Target]], Sequence[Answer]] = ask_all,
    ) -> None:
        self._targets = targets
        self._ask = ask

    def describe(self) -> list[Metric]:
        """Nothing: prometheus_client would scrape to find the names out."""
        return []

    def collect(self) -> Iterator[Metric]:
        answers = self._ask(list(self._targets()))
        up = GaugeMetricFamily(
            f"{PREFIX}volume_up", "Whether the mount's daemon answered.", labels=[VOLUME]
        )
        pods = GaugeMetricFamily(
            f"{PREFIX}volume_pod_info",
            "Always 1; the labels name a pod that uses the volume.",
            labels=[VOLUME, "namespace", "pod"],
        )
        for answer in answers:
            volume = _text(answer.target.volume)
            up.add_metric([volume], float(answer.metrics is not None))
            for namespace, pod in answer.target.pods:
                pods.add_metric([volume, namespace, pod], 1.0)
        yield up
        yield pods
        yield from _families(answers)


def registry_of(*collectors: Any) -> CollectorRegistry:
    """A registry with these collectors alone."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


def _families(answers: Iterable[Answer]) -> Iterator[Metric]:
    """One family for each name, with the samples of all mounts."""
    families: dict[str, Any] = {}
    for answer in answers:
        for name, metric in (answer.metrics or {}).items():
            kind = str(metric.get("type"))
            if kind not in _FAMILIES:
                continue
            family = families.get(name)
            if family is None:
                made = _FAMILIES[kind](f"{PREFIX}{name.removesuffix('_total')}", metric["help"])
                family = families[name] = (kind, made)
            # Two versions of a daemon may differ in what a name is.
            if family[0] == kind:
                for sample in metric["samples"]:
                    _add(family[1], kind, name, answer.target.volume, sample)
    for _, family in families.values():
        yield family


def _add(family: Any, kind: str, name: str, volume: str, sample: dict[str, Any]) -> None:
    labels = {VOLUME: volume, **sample["labels"]}
    labels = {label: _text(value) for label, value in labels.items()}
    full = f"{PREFIX}{name}"
    if kind != "histogram":
        family.add_sample(full, labels, float(sample["value"]))
        return
    for bound, count in sample["buckets"]:
        family.add_sample(f"{full}_bucket", {**labels, "le": bound}, float(count))
    family.add_sample(f"{full}_sum", labels, float(sample["sum"]))
    family.add_sample(f"{full}_count", labels, float(sample["count"]))


def _text(value: str) -> str:
    """A label's value; mountpoints may have bytes that are not UTF-8."""
    return value.encode(errors="surrogateescape").decode(errors="replace")
