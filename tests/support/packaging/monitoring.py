"""The rules and the dashboard as tests read them, and Prometheus' programs."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

PROJECT = Path(__file__).parents[3]
RULES = PROJECT / "monitoring/prometheus/rules.yaml"
DASHBOARD = PROJECT / "monitoring/grafana/fusefs.json"


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test without it."""
    found = shutil.which(name, path=f"{sys.prefix}/bin") or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not there (make setup fetches Debian's)")
    return found


def rules() -> list[dict[str, Any]]:
    """All rules, as they are."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_expressions() -> dict[str, str]:
    """The expressions of all panels, by panel and letter, with the variables' defaults."""
    board = json.loads(DASHBOARD.read_text())
    values = {
        one["name"]: ".*" if one["type"] == "query" else one["query"]
        for one in board["templating"]["list"]
    }
    values["__rate_interval"] = "5m"
    found = {}
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            text = re.sub(r"\$(\w+)", lambda match: str(values[match[1]]), target["expr"])
            found[f"{panel['title']} {target['refId']}"] = text
    return found
