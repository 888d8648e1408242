"""The rules and the dashboard: valid, about metrics that there are, and described."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from fusefs.exporter.collector import PREFIX, MountCollector, registry_of
from fusefs.exporter.queries import MountAnswer, Target
from fusefs.telemetry.metrics import METRICS

PROJECT = Path(__file__).parents[2]
RULES = PROJECT / "monitoring/prometheus/rules.yaml"
DASHBOARD = PROJECT / "monitoring/grafana/fusefs.json"
SCENARIOS = RULES.parent / "tests.yaml"
EXPORTED = {"fusefs_volume_up", "fusefs_volume_pod_info", *(f"{PREFIX}{name}" for name in METRICS)}


def promtool(*arguments: object, text: str | None = None, cwd: Path | None = None) -> str:
    program = shutil.which("promtool", path=f"{sys.prefix}/bin") or shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not there (make setup fetches Debian's)")
    done = subprocess.run(
        [program, *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules() -> list[dict[str, Any]]:
    """All rules, as they are."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_expressions() -> dict[str, str]:
    """The expressions of all panels, by panel and letter, with the variables' defaults."""
    board = json.loads(DASHBOARD.read_text())
    values = {
        one["name"]: one.get("allValue") or one["query"] for one in board["templating"]["list"]
    }
    values["__rate_interval"] = "5m"
    found = {}
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            text = re.sub(r"\$(\w+)", lambda match: str(values[match[1]]), target["expr"])
            found[f"{panel['title']} {target['refId']}"] = text
    return found


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


def test_every_alert_has_a_scenario_and_a_paragraph_with_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    scenarios = SCENARIOS.read_text()
    document = (PROJECT / "docs/operate/alerts.md").read_text()
    sections = dict(re.findall(r"\n## (\w+)\n\n(.*?)(?=\n##|\Z)", document, re.DOTALL))
    for alert in alerts:
        name = alert["alert"]
        assert f'alertname="{name}"' in scenarios
        assert alert["annotations"]["runbook_url"] == f"docs/operate/alerts.md#{name.lower()}"
        for word in ("**Means:**", "**Confirm:**", "**Do:**"):
            assert word in sections[name], name
    assert set(sections) == {alert["alert"] for alert in alerts}
