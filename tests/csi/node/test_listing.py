"""Volumes of a node: `fusefs-csi list`, `fusefs status`, their number, and their metrics."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from csi.errors import ResourceExhaustedError
from csi.node.pod_records import (
    CLAIM_NAME,
    POD_NAME,
    POD_NAMESPACE,
    InlineBounds,
    PodRecord,
    PodRecords,
)
from fusefs.launch.registry import RUNTIME_VARIABLE
from tests.support.csi.node import Node, running_node
from tests.support.csi.publishing import refused
from tests.support.servers.buckets import Bucket
from tests.support.servers.s3_server import ACCESS_KEY, free_ports
from tests.support.waiting import until

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
FLAGS = ("--max-inline-per-pod=1",)


def run(node: Node, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        arguments,
        env={**os.environ, **node.environment, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def listed(node: Node, *options: str) -> str:
    return run(node, *node.command, "list", "--state-dir", str(node.state), *options)


def pod(name: str, namespace: str = "team") -> dict[str, str]:
    return {POD_NAMESPACE: namespace, POD_NAME: name}


def test_each_volume_is_listed_with_its_pod_claim_and_identity(node: Node, shared: Bucket) -> None:
    shared.put("a/hello", b"hello")
    assert listed(node) == "no volumes\n"
    target = node.target("uid", "pvc-1")
    claimed = {CLAIM_NAME: "data", **pod("trainer-0")}
    node.publish("volume", target, bucket=shared.name, prefix="a", **claimed)
    (target / "hello").read_bytes()
    [row] = json.loads(listed(node, "--json"))
    assert (row["namespace"], row["pod"], row["claim"]) == ("team", "trainer-0", "data")
    assert (row["volume"], row["source"]) == ("volume", f"s3://{shared.name}/a/")
    assert row["identity"] == f"access key {ACCESS_KEY}"
    assert (row["state"], row["pending_files"], row["target"]) == ("ok", 0, str(target))
    assert row["cache_bytes"] >= len(b"hello")
    text = listed(node)
    headings, line = text.splitlines()
    assert headings.split()[:2] == ["POD", "CLAIM"]
    assert line.split()[:3] == ["team/trainer-0", "data", "volume"]
    assert "secret" not in text.lower()
    node.unpublish("volume", target)
    until(lambda: listed(node) == "no volumes\n", "the volume's end")


def test_status_finds_the_drivers_mounts_where_the_manifests_say(
    node: Node, shared: Bucket
) -> None:
    target = node.target("uid")
    node.publish("volume", target, bucket=shared.name, prefix="a", **pod("p"))
    variable = {RUNTIME_VARIABLE: str(node.state / "fusefs")}
    command = [node.command[0], "-m", "fusefs.cli.main", "status", "--json"]

    def answers() -> bool:
        shown = json.loads(run(node, *command, **variable))
        [status] = [each for each in shown if each["mountpoint"].startswith(str(node.mounts))]
        return "not_answering" not in status

    until(answers, "its daemon answers")
    node.unpublish("volume", target)


def test_a_pod_has_so_many_inline_volumes_and_no_more(node: Node, shared: Bucket) -> None:
    inline = {"csi.storage.k8s.io/ephemeral": "true", "bucket": shared.name, "prefix": "a"}
    targets = [node.target("pod", f"inline-{number}") for number in range(2)]
    for _ in range(2):  # again, as kubelet does each minute
        node.publish("csi-0", targets[0], **inline, **pod("one"))
    with refused(EXHAUSTED, "pod one has 1 inline volumes", "the scheduler does not count them"):
        node.publish("csi-1", targets[1], **inline, **pod("one"))
    node.unpublish("csi-0", targets[0])
    # What was refused has left nothing, although kubelet does not unpublish it.
    assert list((node.state / "pods").iterdir()) == []


def test_inline_volumes_are_counted_by_pod_and_by_namespace(tmp_path: Path) -> None:
    records, bounds = PodRecords(tmp_path / "records"), InlineBounds(1, 2)

    def publish(name: str, namespace: str = "team") -> Path:
        path = tmp_path / f"pods/{namespace}-{name}/volumes/kubernetes.io~csi/data/mount"
        path.mkdir(parents=True, exist_ok=True)
        record = PodRecord(str(path), namespace, name, is_inline=True)
        with records.publishing(record, bounds):
            return path

    publish("one")
    third = publish("three")
    with pytest.raises(ResourceExhaustedError, match="namespace team has 2 inline volumes"):
        publish("four")
    publish("five", "other")
    publish("one")
    records.forget(third)
    publish("four")
    # Nor does what a killed driver left count.
    os.rename(tmp_path / "pods/team-one", tmp_path / "removed")
    assert publish("six") in records.all()


def test_attributes_of_an_author_are_no_claims() -> None:
    context: dict[str, str] = {CLAIM_NAME: "forged", **pod("p")}
    assert PodRecord.of(Path("/target"), context, is_inline=True).claim == ""


@pytest.fixture
def served(data: Bucket) -> Iterator[tuple[Node, str]]:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with running_node(f"--metrics={address}", main=data.server.endpoint_url) as node:
        yield node, f"http://{address}/metrics"


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def test_volumes_are_served_with_their_pods(served: tuple[Node, str], data: Bucket) -> None:
    node, url = served
    target = node.target("pod")
    node.publish("vol", target, bucket=data.name, prefix="a", **pod("trainer-0"))
    assert (target / "hello").read_bytes() == b"hello"
    until(lambda: 'fusefs_volume_up{volume="vol"} 1.0' in scrape(url), "its daemon answers")
    text = scrape(url)
    assert 'fusefs_volume_pod_info{namespace="team",pod="trainer-0",volume="vol"} 1.0' in text
    assert 'fusefs_requests_total{operation="lookup",outcome="ok",volume="vol"}' in text
    node.unpublish("vol", target)
    assert 'volume="vol"' not in scrape(url)
    until(lambda: not node.leftovers(), "nothing is left")
