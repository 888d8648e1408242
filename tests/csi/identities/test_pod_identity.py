"""EKS Pod Identity: a pod's token, exchanged at the agent of its node, for the pod's volume."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest

from csi.identities.credentials import POD_IDENTITY_AUDIENCE
from tests.support.csi.node import Node, running_node
from tests.support.csi.node import node as node
from tests.support.csi.publishing import POD, refused, tokens
from tests.support.servers.buckets import Bucket
from tests.support.servers.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

TOKEN = "the.pods.token"


class Agent(BaseHTTPRequestHandler):
    """Gives the server's keys for one token, as the agent of EKS does."""

    sent_tokens: list[str]

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "")
        self.sent_tokens.append(token)
        ends = datetime.now(UTC) + timedelta(hours=1)
        keys = {
            "AccessKeyId": ACCESS_KEY,
            "SecretAccessKey": SECRET_KEY,
            "Token": "",
            "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        body = json.dumps(keys if token == TOKEN else {"message": "no association"}).encode()
        self.send_response(200 if token == TOKEN else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def agent() -> Iterator[str]:
    """The agent's URL."""
    Agent.sent_tokens = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Agent) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/credentials"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def running(s3: S3Server) -> Iterator[Node]:
    # "aws" is the name that Pod Identity is for; an administrator may give it an address.
    with (
        agent() as url,
        running_node(
            f"--pod-identity-agent={url}", aws=s3.endpoint_url, main=s3.endpoint_url
        ) as node,
    ):
        yield node


def test_a_pods_association_reads_its_volume(node: Node, shared: Bucket) -> None:
    shared.put("a/hello", b"hello")
    target = node.target("pod")
    volume = {"store": "aws", "bucket": shared.name, "prefix": "a", "podIdentity": "true", **POD}
    node.publish("volume", target, secrets=tokens(TOKEN, POD_IDENTITY_AUDIENCE), **volume)
    assert (target / "hello").read_bytes() == b"hello"
    assert set(Agent.sent_tokens) == {TOKEN}
    assert TOKEN not in node.log.read_text()
    node.unpublish("volume", target)


def test_tokens_for_the_agent_are_requested_and_for_aws_alone(node: Node, shared: Bucket) -> None:
    volume = {"bucket": shared.name, "podIdentity": "true", **POD}
    with refused(grpc.StatusCode.FAILED_PRECONDITION, POD_IDENTITY_AUDIENCE, "tokenRequests"):
        node.publish(
            "volume",
            node.target("pod"),
            secrets=tokens(TOKEN, "sts.amazonaws.com"),
            **{**volume, "store": "aws"},
        )
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "podIdentity"):
        node.publish(
            "volume", node.target("pod"), secrets=tokens(TOKEN, POD_IDENTITY_AUDIENCE), **volume
        )
