"""A real Prometheus scrapes a real mount: every rule and every panel of the dashboard has values.

The rules are meant for hours. Their minutes are seconds here, so that a test sees in seconds what
an operator sees in minutes. Which alert fires when, the scenarios say beside the rules.
"""

import contextlib
import itertools
import json
import os
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from fusefs.exporter.collector import MountCollector, registry_of, serve
from fusefs.exporter.queries import target_at
from tests.support.mounting import Mount, Mounter
from tests.support.packaging.monitoring import RULES, dashboard_expressions, program, rules
from tests.support.servers.buckets import Bucket
from tests.support.servers.s3_server import free_ports, spawn
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

PAUSE_S = 0.2
# At least four scrapes fit into the shortest window.
WINDOW = "[8s]"
# A limit that does not depend on what else fills this machine's disk.
ROOMY = ("--cache-size", "256MiB", "--min-free", "1%")
POD = ("team", "trainer-0")


class OtherExporters:
    """The metrics of NVIDIA's dcgm-exporter and of kube-state-metrics that rules use."""

    def __init__(self, volume: str) -> None:
        self._volume = volume

    def collect(self) -> Iterator[Metric]:
        samples = {
            "DCGM_FI_DEV_GPU_UTIL": (40, {"gpu": "0", "namespace": POD[0], "pod": POD[1]}),
            "kube_persistentvolume_info": (1, {"csi_volume_handle": self._volume}),
            "kube_persistentvolume_claim_ref": (1, {"name": "data", "claim_namespace": POD[0]}),
        }
        for name, (value, labels) in samples.items():
            labels["persistentvolume"] = "pv"
            family = GaugeMetricFamily(name, "See its exporter.", labels=list(labels))
            family.add_metric(list(labels.values()), value)
            yield family


def hurried(expression: str) -> str:
    """The expression with windows of seconds; those of days stay, as they look for maxima."""
    return re.sub(r"\[\d+[mh]\]", WINDOW, expression)


def hurried_rules() -> str:
    """The rules with windows of seconds, and alerts at once, as far as that makes sense.

    What must last for ten minutes may be the case for seconds under any load.
    """
    content = yaml.safe_load(RULES.read_text())
    for group in content["groups"]:
        for rule in group["rules"]:
            rule["expr"] = hurried(rule["expr"])
            if rule.get("for") == "5m":
                del rule["for"]
    return str(yaml.safe_dump(content))


Query = Callable[[str], list[dict[str, Any]]]


@contextlib.contextmanager
def prometheus(directory: Path, scraped: int) -> Iterator[Query]:
    """A server with the rules that scrapes a port; yields a function that evaluates expressions."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": "fusefs",
                "honor_labels": True,
                "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}],
            }
        ],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (directory / "rules.yaml").write_text(hurried_rules())
    address = f"127.0.0.1:{free_ports(1)[0]}"

    def query(expression: str) -> list[dict[str, Any]]:
        url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return list(json.load(answer)["data"]["result"])

    def is_ready() -> bool:
        with contextlib.suppress(OSError):
            return bool(query("vector(1)"))
        return False

    command = [
        program("prometheus"),
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    process = spawn(command, directory / "prometheus.log")
    try:
        until(is_ready, "Prometheus answers")
        yield query
    finally:
        process.kill()
        process.wait()


def load(mount: Mount) -> Callable[[], None]:
    """Something of everything, a little more at each call: reads, opens, lists, writes."""
    numbers = itertools.count()

    def step() -> None:
        number = next(numbers)
        for offset in range(3):
            (mount.path / f"small/{(3 * number + offset) % 300:03}").read_bytes()
        (mount.path / "large").read_bytes()
        (mount.path / f"written-{number}").write_bytes(bytes(1024))
        (mount.path / f"missing-{number}").exists()

    return step


def test_every_rule_and_panel_has_a_value_under_load_and_no_alert_fires(
    mounter: Mounter, bucket: Bucket, tmp_path: Path
) -> None:
    program("prometheus")
    for number in range(300):
        bucket.put(f"small/{number:03}", bytes(10240))
    bucket.put("large", os.urandom(8 << 20))
    # What the kernel reads itself would be no value for the rates of what the daemon serves.
    mount = mounter("--no-read-only", "--passthrough", "off", *ROOMY)
    wanted = {rule.get("record") or rule["alert"]: rule["expr"] for rule in rules()}
    wanted |= dashboard_expressions()
    # With a value whether a comparison holds or not.
    compared = re.compile(r"(==|<=|>=|<|>) (?=[\d.]|max_over)")
    missing = {name: compared.sub(r"\1 bool ", hurried(text)) for name, text in wanted.items()}
    target = target_at(mount.path, str(mount.path), [POD])
    [port] = free_ports(1)
    step = load(mount)
    with contextlib.ExitStack() as stack:
        others = OtherExporters(str(mount.path))
        registry = registry_of(MountCollector(lambda: [target]), others)
        stack.callback(serve("127.0.0.1", port, registry))
        query = stack.enter_context(prometheus(tmp_path, port))
        deadline = time.monotonic() + 2 * PATIENCE_S
        while missing and time.monotonic() < deadline:
            step()
            time.sleep(PAUSE_S)
            missing = {name: text for name, text in missing.items() if not query(text)}
        assert missing == {}
        until(lambda: query('ALERTS{alertstate="firing"}') == [], "no alert fires")
