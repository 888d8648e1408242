"""The rules and the dashboard: valid, about metrics that there are, and described."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import generate_latest

from fusefs.exporter.collector import PREFIX, MountCollector, registry_of
from fusefs.exporter.queries import MountAnswer, Target
from fusefs.telemetry.metrics import METRICS
from tests.support.packaging.monitoring import (
    DASHBOARD,
    PROJECT,
    RULES,
    dashboard_expressions,
    program,
    rules,
)

SCENARIOS = RULES.parent / "tests.yaml"
EXPORTED = {"fusefs_volume_up", "fusefs_volume_pod_info", *(f"{PREFIX}{name}" for name in METRICS)}


def promtool(*arguments: object, text: str | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_valid() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", RULES)


def test_in_each_scenario_the_right_alerts_fire_alone() -> None:
    promtool("test", "rules", SCENARIOS.name, cwd=SCENARIOS.parent)


def test_the_exported_metrics_are_named_as_prometheus_wants_them() -> None:
    def sample(metric: Any) -> dict[str, Any]:
        labels = dict.fromkeys(metric.labels, "x")
        if metric.type == "histogram":
            return {"labels": labels, "buckets": [["1.0", 1], ["+Inf", 2]], "sum": 3, "count": 2}
        return {"labels": labels, "value": 1}

    answer = {
        name: {"type": metric.type, "help": metric.help, "samples": [sample(metric)]}
        for name, metric in METRICS.items()
    }
    target = Target("/data", Path(), (("team", "pod"),))
    collector = MountCollector(lambda: [target], lambda _targets: [MountAnswer(target, answer)])
    text = generate_latest(registry_of(collector)).decode()
    promtool("check", "metrics", text=text)
    assert names_in(text) & EXPORTED == EXPORTED


def names_in(text: str) -> set[str]:
    """The metrics of the exporter, and recorded ones, that a text names."""
    found = set(re.findall(r"\bfusefs[_:][\w:]+", text))
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in found}


def test_every_expression_is_about_metrics_that_there_are() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    expressions = [rule["expr"] for rule in rules()] + list(dashboard_expressions().values())
    for expression in expressions:
        assert names_in(expression) <= EXPORTED | recorded, expression


def test_every_metric_is_in_the_dashboard_or_a_rule() -> None:
    expressions = [rule["expr"] for rule in rules()] + list(dashboard_expressions().values())
    assert set().union(*map(names_in, expressions)) >= EXPORTED


def missing_in(found: Any, wanted: Any, place: str = "") -> list[str]:
    """The places of what is in `wanted` and not, or otherwise, in `found`."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        below = [missing_in(found.get(key), wanted[key], f"{place}.{key}") for key in wanted]
        return [one for places in below for one in places]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        numbered = enumerate(zip(found, wanted, strict=True))
        below = [missing_in(*pair, f"{place}[{number}]") for number, pair in numbered]
        return [one for places in below for one in places]
    return [] if found == wanted else [place]


def test_the_dashboard_is_what_grafanas_schema_describes() -> None:
    """Each panel says what it shows, and has thresholds."""
    board = json.loads(DASHBOARD.read_text())
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
    assert missing_in(read, board) == []
    for panel in board["panels"]:
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]


@pytest.mark.parametrize(
    ("chosen", "volumes"),
    [
        ({}, ["a", "b", "c"]),
        ({"instance": "n2"}, ["c"]),
        ({"node": "node-1"}, ["a", "b"]),
        ({"namespace": "team"}, ["a"]),
        ({"pod": "train-1"}, ["b"]),
        ({"claim": "data"}, ["b"]),
        ({"claim": "data", "namespace": "team"}, []),
    ],
)
def test_the_dashboards_volumes_are_those_of_a_host_a_pod_or_a_claim(
    chosen: dict[str, str], volumes: list[str], tmp_path: Path
) -> None:
    """The third one is mounted on a machine without Kubernetes."""
    (variable,) = (
        one
        for one in json.loads(DASHBOARD.read_text())["templating"]["list"]
        if one["name"] == "volume"
    )
    query = variable["query"]["query"].removeprefix("query_result(").removesuffix(")")
    expression = re.sub(r"\$(\w+)", lambda match: chosen.get(match[1], ".*"), query)
    up, pod = "fusefs_volume_up", "fusefs_volume_pod_info"
    of = 'instance="n1",node="node-1",namespace="fusefs-csi",pod="driver"'
    series = [
        f'{up}{{volume="a",{of}}}',
        f'{up}{{volume="b",{of}}}',
        f'{up}{{volume="c",instance="n2"}}',
        f'{pod}{{volume="a",instance="n1",node="node-1",namespace="team",pod="train-0"}}',
        f'{pod}{{volume="b",instance="n1",node="node-1",namespace="other",pod="train-1"}}',
        'kube_persistentvolume_info{persistentvolume="pv",csi_volume_handle="b"}',
        'kube_persistentvolume_claim_ref{persistentvolume="pv",name="data",claim_namespace="other"}',
    ]
    scenario = {
        "rule_files": [str(RULES)],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": one, "values": "1x9"} for one in series],
                "promql_expr_test": [
                    {
                        "expr": f"count by (volume) ({expression})",
                        "eval_time": "5m",
                        "exp_samples": [
                            {"labels": f'{{volume="{volume}"}}', "value": 1} for volume in volumes
                        ],
                    }
                ],
            }
        ],
    }
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    promtool("test", "rules", tmp_path / "scenario.yaml")


def test_every_alert_has_a_scenario_and_a_paragraph_with_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    scenarios = SCENARIOS.read_text()
    document = (PROJECT / "docs/operate/alerts.md").read_text()
    sections = dict(re.findall(r"\n## (\w+)\n\n(.*?)(?=\n##|\Z)", document, re.DOTALL))
    for alert in alerts:
        name = alert["alert"]
        assert f'alertname="{name}"' in scenarios
        page = '{{ or $externalLabels.fusefs_runbooks "docs/operate/alerts.md" }}'
        assert alert["annotations"]["runbook_url"] == f"{page}#{name.lower()}"
        assert "{{ $labels.instance }}" in alert["annotations"]["summary"]
        for word in ("**Means:**", "**Confirm:**", "**Do:**"):
            assert word in sections[name], name
    assert set(sections) == {alert["alert"] for alert in alerts}
