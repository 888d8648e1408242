"""A real Prometheus for tests: scrapes what a test serves, with the project's rules.

The rules are meant for hours; `hurried` makes seconds of their minutes, so that a
test sees in seconds what an operator sees in minutes.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.servers.s3_server import spawn

PROJECT = Path(__file__).parents[3]
RULES = PROJECT / "monitoring/prometheus/rules.yaml"
DASHBOARD = PROJECT / "monitoring/grafana/fusefs.json"
START_LIMIT_S = 60
WAIT_LIMIT_S = 90
SCRAPE_S = 0.5
# At least four scrapes fit into the shortest window.
WINDOW_S = 8
PAUSE_S = 0.2

Rule = dict[str, Any]


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips without it."""
    found = shutil.which(name, path=str(Path(sys.prefix) / "bin")) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not there (make setup fetches Debian's)")
    return found


def rules() -> list[Rule]:
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


def hurried(expression: str) -> str:
    """The expression with windows of seconds; those of days stay, as they look for maxima."""
    return re.sub(r"\[\d+[mh]\]", f"[{WINDOW_S}s]", expression)


def without_thresholds(expression: str) -> str:
    """The expression with a value whether the comparisons hold or not."""
    return re.sub(r"(==|<=|>=|<|>) (?=[\d.]|max_over)", r"\1 bool ", expression)


class Prometheus:
    """One server; a context manager. `port` is where its metrics are, `free_port` its own."""

    def __init__(self, directory: Path, port: int, free_port: int) -> None:
        self._directory = directory
        self._port = port
        self._url = f"http://127.0.0.1:{free_port}"
        self._address = f"127.0.0.1:{free_port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Prometheus:
        config = {
            "global": {
                "scrape_interval": f"{int(1000 * SCRAPE_S)}ms",
                "scrape_timeout": f"{int(1000 * SCRAPE_S)}ms",
                "evaluation_interval": "1s",
            },
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {
                    "job_name": "fusefs",
                    "honor_labels": True,
                    "static_configs": [{"targets": [f"127.0.0.1:{self._port}"]}],
                }
            ],
        }
        (self._directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
        (self._directory / "rules.yaml").write_text(_hurried_rules())
        self._process = spawn(
            [
                program("prometheus"),
                f"--config.file={self._directory / 'prometheus.yaml'}",
                f"--storage.tsdb.path={self._directory / 'data'}",
                f"--web.listen-address={self._address}",
                "--log.level=warn",
            ],
            self._directory / "prometheus.log",
        )
        deadline = time.monotonic() + START_LIMIT_S
        while not self._is_ready():
            log = (self._directory / "prometheus.log").read_text()
            assert self._process.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        url = f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        found: list[dict[str, Any]] = body["data"]["result"]
        return found

    def firing(self) -> set[tuple[str, str]]:
        """The alerts that fire: volumes, and names of alerts."""
        found = (sample["metric"] for sample in self.query('ALERTS{alertstate="firing"}'))
        return {(labels.get("volume", ""), labels["alertname"]) for labels in found}

    def wait_for(self, expressions: dict[str, str], meanwhile: Callable[[], object]) -> list[str]:
        """Call `meanwhile` until each expression has had a value; return those that never had."""
        missing = dict(expressions)
        deadline = time.monotonic() + WAIT_LIMIT_S
        while missing and time.monotonic() < deadline:
            meanwhile()
            time.sleep(PAUSE_S)
            for name, expression in list(missing.items()):
                if self.query(expression):
                    del missing[name]
        return [f"{name}: {expression}" for name, expression in missing.items()]


def _hurried_rules() -> str:
    """The rules with windows of seconds, and alerts at once, as far as that makes sense.

    What must last for ten minutes may be the case for seconds under any load, and a
    volume is down while its daemon is replaced: these never fire in a test.
    """
    content = yaml.safe_load(RULES.read_text())
    for group in content["groups"]:
        for rule in group["rules"]:
            rule["expr"] = hurried(rule["expr"])
            if rule.get("for") == "5m":
                del rule["for"]
    return str(yaml.safe_dump(content))
