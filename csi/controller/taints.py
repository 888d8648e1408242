"""`fusefs-csi untaint`: removes the startup taint of nodes whose driver is registered.

A node pool whose nodes begin with the taint `s3.csi.fusefs.dev/agent-not-ready` gets no
pod with volumes before it can mount them: without it pods that were scheduled first wait
in ContainerCreating, and an autoscaler takes the new node for ready.

It runs once per cluster, beside the controller, so that no pod on a node needs a token of
the API server. Kubelet writes the drivers of its node into its CSINode object: these small
objects are watched, and of each node that has the driver the taint is removed, once.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import signal
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from csi.daemons.client import DAEMONS_LABEL
from csi.server import DRIVER_NAME

log = logging.getLogger(__name__)

TAINT = f"{DRIVER_NAME}/agent-not-ready"
# Where the API server mounts a pod's account.
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# After which a watch is begun again, with every object: so long a node waits whose change failed.
WATCH_S = 60
WAITING_S = 5
PAUSE_S = 5.0
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The API server at `url`, as the account whose token is in the file `token`."""

    url: str
    token: Path
    context: ssl.SSLContext | None = None
    namespace: str = ""

    def get(self, path: str) -> Any:
        """The object at a path.

        Raises:
            OSError: the API server does not answer, or refuses.
        """
        with self._open("GET", path, TIMEOUT_S) as answer:
            return json.load(answer)

    def patch(self, path: str, operations: list[dict[str, Any]]) -> None:
        """Change the object at a path (RFC 6902).

        Raises:
            OSError: as `get`; also where a test among the operations fails.
        """
        with self._open("PATCH", path, TIMEOUT_S, json.dumps(operations).encode()):
            pass

    def watch(self, path: str, for_s: int) -> Iterator[Any]:
        """The changes of a list's objects, after one for each that is there.

        Raises:
            OSError: as `get`.
        """
        seconds = f"watch=true&timeoutSeconds={for_s}"
        with self._open("GET", f"{path}?{seconds}", for_s + TIMEOUT_S) as answer:
            for line in answer:
                yield json.loads(line)

    def _open(self, method: str, path: str, timeout_s: float, body: bytes | None = None) -> Any:
        request = urllib.request.Request(self.url + path, body, method=method)
        # Kubelet renews it.
        request.add_header("Authorization", f"Bearer {self.token.read_text().strip()}")
        if body is not None:
            request.add_header("Content-Type", "application/json-patch+json")
        # Without the environment's proxies: the address is of the cluster's network, and Python
        # takes no networks in NO_PROXY.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.context)
        )
        return opener.open(request, timeout=timeout_s)


def api_of_pod() -> ApiServer:
    """The API server as a pod finds it.

    Raises:
        OSError: this is no pod with an account.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise OSError("KUBERNETES_SERVICE_HOST is not set: this is no pod of a cluster")
    context = ssl.create_default_context(cafile=os.fspath(ACCOUNT / "ca.crt"))
    name = f"[{host}]" if ":" in host else host
    namespace = (ACCOUNT / "namespace").read_text().strip()
    return ApiServer(f"https://{name}:{port}", ACCOUNT / "token", context, namespace)


class Untainter:
    """Removes the taint of nodes that have the driver, each once."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._done: set[str] = set()  # the uids of CSINode objects
        self._is_waiting = False  # some node keeps its taint for now

    def watch_once(self) -> None:
        """Handle every node that is there, and changes until the API server ends the watch.

        Raises:
            OSError, ValueError, http.client.HTTPException: the API server ended it in another way.
        """
        present: set[str] = set()
        for_s, self._is_waiting = WAITING_S if self._is_waiting else WATCH_S, False
        for event in self._api.watch("/apis/storage.k8s.io/v1/csinodes", for_s):
            if event["type"] == "ERROR":
                raise OSError(event["object"].get("message", "the watch failed"))
            self._handle(event["type"], event["object"])
            present.add(event["object"]["metadata"]["uid"])
        # The deletion of the others came between two watches.
        self._done &= present

    def _handle(self, kind: str, csi_node: Any) -> None:
        name, uid = csi_node["metadata"]["name"], csi_node["metadata"]["uid"]
        drivers = [driver["name"] for driver in csi_node["spec"].get("drivers") or ()]
        if kind == "DELETED":
            self._done.discard(uid)
        elif DRIVER_NAME in drivers and uid not in self._done:
            try:
                self._untaint(name)
            except Exception as error:  # of this node alone: the others do not wait for it
                self._is_waiting = True
                log.warning("node %s keeps its taint for now: %r", name, error)
            else:
                self._done.add(uid)

    def _untaint(self, node: str) -> None:
        path = f"/api/v1/nodes/{node}"
        taints = self._api.get(path)["spec"].get("taints") or ()
        for number, taint in reversed(list(enumerate(taints))):
            if taint["key"] == TAINT:
                self._check_daemons(node)
                # Others add and remove taints, too: only this one is removed.
                where = f"/spec/taints/{number}"
                operations = [
                    {"op": "test", "path": where, "value": taint},
                    {"op": "remove", "path": where},
                ]
                self._api.patch(path, operations)
                log.info("node %s can mount volumes: its taint is removed", node)

    def _check_daemons(self, node: str) -> None:
        query = f"labelSelector={quote(DAEMONS_LABEL)}&fieldSelector=spec.nodeName%3D{node}"
        pods = self._api.get(f"/api/v1/namespaces/{self._api.namespace}/pods?{query}")["items"]
        found = [each for pod in pods for each in pod["status"].get("conditions") or ()]
        if not any(each["type"] == "Ready" and each["status"] == "True" for each in found):
            raise OSError(f"it has {len(pods)} pods of fusefs-csi-daemons, and none is ready")


def run(_arguments: argparse.Namespace) -> int:
    """Remove taints until SIGTERM; return the exit status, which is 1 if the watch has failed.

    Raises:
        OSError: this is no pod with an account.
    """
    untainter = Untainter(api_of_pod())
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    watch = threading.Thread(target=_watch_on, args=(untainter,), name="untaint", daemon=True)
    watch.start()
    # Python runs signal handlers only in this thread, so it has to wake up.
    while not ending.wait(1.0):
        if not watch.is_alive():  # its traceback is in the log; kubelet starts another container
            return 1
    return 0


def _watch_on(untainter: Untainter) -> None:
    while True:
        try:
            untainter.watch_once()
        except (OSError, ValueError, http.client.HTTPException) as error:
            log.warning("tried again: %s", error)
        time.sleep(PAUSE_S)
