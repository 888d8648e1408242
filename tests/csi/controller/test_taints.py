"""`fusefs-csi untaint` against an API server that has CSINodes and nodes, and may refuse."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from csi.controller import taints
from csi.controller.taints import TAINT, ApiServer, Untainter
from csi.server import DRIVER_NAME

OTHER = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
OURS = {"key": TAINT, "effect": "NoSchedule"}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "Bearer the-token":
            self.send_error(401)
        elif self.path.startswith("/apis/storage.k8s.io/v1/csinodes?watch=true"):
            lines = [json.dumps(event) for event in self.server.events]
            self._answer("\n".join([*lines, ""]))
        elif self.path.startswith("/api/v1/namespaces/fusefs/pods?"):
            selector = "labelSelector=app.kubernetes.io/name%3Dfusefs-csi-daemons&fieldSelector="
            assert self.path.partition("?")[2].startswith(f"{selector}spec.nodeName%3D")
            node = self.path.rpartition("%3D")[2]
            ready = {"type": "Ready", "status": str(node not in self.server.unready)}
            self._answer(json.dumps({"items": [{"status": {"conditions": [ready]}}]}))
        else:
            name = self.path.removeprefix("/api/v1/nodes/")
            self.server.read_nodes.append(name)
            self._answer(json.dumps({"spec": {"taints": self.server.taints[name]}}))

    def do_PATCH(self) -> None:
        assert self.headers["Content-Type"] == "application/json-patch+json"
        body = self.rfile.read(int(self.headers["content-length"]))
        taints = self.server.taints[self.path.removeprefix("/api/v1/nodes/")]
        test, removal = json.loads(body)
        number = int(test["path"].rpartition("/")[2])
        if self.server.is_refusing or taints[number] != test["value"]:
            self.send_error(422)
            return
        assert (removal["op"], removal["path"]) == ("remove", test["path"])
        del taints[number]
        self._answer("{}")

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    events: list[Any]
    taints: dict[str, list[Any]]
    read_nodes: list[str]
    is_refusing: bool
    unready: set[str]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.events, server.read_nodes, server.is_refusing = [], [], False
        server.unready = set()
        server.taints = {name: [OTHER, OURS] for name in ("new", "bare")}
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def untainter(server: Server, tmp_path: Path) -> Untainter:
    (tmp_path / "token").write_text("the-token\n")
    url = f"http://127.0.0.1:{server.server_port}"
    return Untainter(ApiServer(url, tmp_path / "token", namespace="fusefs"))


def csi_node(name: str, *drivers: str, kind: str = "ADDED") -> dict[str, Any]:
    metadata = {"name": name, "uid": f"uid of {name}"}
    spec = {"drivers": [{"name": driver} for driver in drivers] or None}
    return {"type": kind, "object": {"metadata": metadata, "spec": spec}}


def test_the_taint_goes_when_kubelet_has_the_driver(server: Server, untainter: Untainter) -> None:
    server.events = [csi_node("new", "ebs.csi.aws.com"), csi_node("bare")]
    untainter.watch_once()
    assert server.read_nodes == []
    server.events = [csi_node("new", "ebs.csi.aws.com", DRIVER_NAME, kind="MODIFIED")]
    untainter.watch_once()
    assert server.taints == {"new": [OTHER], "bare": [OTHER, OURS]}


def test_each_node_is_looked_at_once_and_again_when_it_is_another(
    server: Server, untainter: Untainter
) -> None:
    server.events = [csi_node("new", DRIVER_NAME)]
    untainter.watch_once()
    untainter.watch_once()
    assert server.read_nodes == ["new"]
    server.events = [csi_node("new", kind="DELETED"), csi_node("new", DRIVER_NAME)]
    untainter.watch_once()
    assert server.read_nodes == ["new", "new"]


def test_a_node_whose_deletion_was_missed_is_forgotten(
    server: Server, untainter: Untainter
) -> None:
    for events in [[csi_node("new", DRIVER_NAME)], [], [csi_node("new", DRIVER_NAME)]]:
        server.events = events
        untainter.watch_once()
    assert server.read_nodes == ["new", "new"]


def test_a_refused_change_is_tried_again(server: Server, untainter: Untainter) -> None:
    server.events, server.is_refusing = [csi_node("new", DRIVER_NAME)], True
    untainter.watch_once()
    assert server.taints["new"] == [OTHER, OURS]
    server.is_refusing = False
    untainter.watch_once()
    assert server.taints["new"] == [OTHER]


def test_the_taint_waits_for_the_pod_of_daemons(
    server: Server, untainter: Untainter, caplog: pytest.LogCaptureFixture
) -> None:
    server.events, server.unready = [csi_node("new", DRIVER_NAME)], {"new"}
    untainter.watch_once()
    assert server.taints["new"] == [OTHER, OURS]
    assert "fusefs-csi-daemons, and none is ready" in caplog.text
    server.unready.clear()
    untainter.watch_once()
    assert server.taints["new"] == [OTHER]


def test_a_node_that_cannot_be_changed_keeps_no_other_waiting(
    server: Server, untainter: Untainter
) -> None:
    server.taints["odd"] = [{"effect": "NoSchedule"}]
    server.events = [csi_node("odd", DRIVER_NAME), csi_node("new", DRIVER_NAME)]
    untainter.watch_once()
    assert server.taints["new"] == [OTHER]


def test_the_process_ends_with_its_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taints, "api_of_pod", lambda: None)
    monkeypatch.setattr(taints, "_watch_on", lambda _: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert taints.run(argparse.Namespace()) == 1


def test_a_proxy_of_the_environment_is_no_way_to_the_api_server(
    server: Server, untainter: Untainter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    server.events = [csi_node("new", DRIVER_NAME)]
    untainter.watch_once()
    assert server.taints["new"] == [OTHER]


def test_a_watch_that_expired_is_an_error(server: Server, untainter: Untainter) -> None:
    server.events = [{"type": "ERROR", "object": {"message": "too old resource version"}}]
    with pytest.raises(OSError, match="too old"):
        untainter.watch_once()
