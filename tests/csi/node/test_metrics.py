"""`/metrics` of the node plugin: all volumes, with the pods that use them."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest

from tests.support.csi.node import Node, running_node
from tests.support.csi.publishing import data as data
from tests.support.servers.buckets import Bucket
from tests.support.servers.s3_server import free_ports
from tests.support.waiting import until

POD = {"csi.storage.k8s.io/pod.name": "trainer-0", "csi.storage.k8s.io/pod.namespace": "team"}


@pytest.fixture
def served(data: Bucket) -> Iterator[tuple[Node, str]]:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with running_node(f"--metrics={address}", main=data.server.endpoint_url) as node:
        yield node, f"http://{address}/metrics"


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def test_volumes_are_served_with_their_pods(served: tuple[Node, str], data: Bucket) -> None:
    node, url = served
    target = node.target("pod")
    node.publish("vol", target, bucket=data.name, prefix="a", **POD)
    assert (target / "hello").read_bytes() == b"hello"
    text = scrape(url)
    assert 'fusefs_volume_up{volume="vol"} 1.0' in text
    assert 'fusefs_volume_pod_info{namespace="team",pod="trainer-0",volume="vol"} 1.0' in text
    assert 'fusefs_requests_total{operation="lookup",outcome="ok",volume="vol"}' in text
    call = 'fusefs_csi_call_duration_seconds_count{code="OK",method="NodePublishVolume"} 1.0'
    assert call in text
    node.unpublish("vol", target)
    assert 'volume="vol"' not in scrape(url)
    until(lambda: not node.leftovers(), "nothing is left")
