"""Pods, claims and jobs of the scenarios, and waiting for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster, CommandError

Object = dict[str, Any]
CLASS = "fusefs-fresh"
_LOAD = Path(__file__).with_name("load.py").read_text()
# What the profile `restricted` of pod security demands.
RESTRICTED: Object = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "runAsUser": 65534,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def claim(name: str, storage_class: str = CLASS, mode: str = "ReadWriteMany") -> Object:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": [mode],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }


def by_claim(name: str, **more: Any) -> Object:
    return {"name": "v", "persistentVolumeClaim": {"claimName": name, **more}}


def pod(
    image: str,
    name: str,
    script: str,
    volume: Object,
    *,
    mount: Object | None = None,
    node: str = "",
    context: Object | None = None,
    group: int | None = None,
) -> Object:
    """A pod that runs a shell script (in the driver's image, which has Python) over a volume /v."""
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "containers": [
            {
                "name": "c",
                "image": image,
                "command": ["sh", "-c", f"trap 'exit 143' TERM\n{script}"],
                "securityContext": context or {"runAsUser": 0},
                "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
                "volumeMounts": [{"name": "v", "mountPath": "/v", **(mount or {})}],
            }
        ],
        "volumes": [volume],
    }
    if group is not None:
        spec["securityContext"] = {"fsGroup": group}
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def load(image: str, name: str, claim_name: str, node: str) -> Object:
    """A pod that reads and writes until it ends, and counts errors."""
    made = pod(image, name, "", by_claim(claim_name), node=node)
    made["spec"]["containers"][0]["command"] = ["python3", "-c", _LOAD, "/v"]
    made["spec"]["restartPolicy"] = "Always"
    return made


class Namespace:
    """A namespace of the scenario's own, which is deleted at its end, and waited for."""

    def __init__(self, cluster: Cluster, name: str, security: str = "baseline") -> None:
        self.cluster = cluster
        self.name = f"scenario-{name}"
        self._security = security

    def __enter__(self) -> Namespace:
        label = {"pod-security.kubernetes.io/enforce": self._security}
        metadata = {"name": self.name, "labels": label}
        self.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.kubectl("delete", "namespace", self.name, "--timeout=180s")

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.name, *arguments, text=text)

    def apply(self, *objects: Object) -> None:
        self.cluster.apply(*objects, namespace=self.name)

    def get(self, *arguments: str) -> Any:
        return self.cluster.get("-n", self.name, *arguments)

    def wait(self, what: str, condition: str, limit_s: int = 180) -> None:
        """Wait for a condition of an object.

        Raises:
            CommandError: it did not come; with the namespace's events.
        """
        try:
            self.kubectl("wait", f"--for={condition}", what, f"--timeout={limit_s}s")
        except CommandError as error:
            events = self.kubectl("get", "events", "--sort-by=.lastTimestamp")[-3000:]
            raise CommandError(f"{error}\n{events}") from None

    def succeeds(self, *objects: Object, limit_s: int = 180) -> None:
        """Run pods to their end, which has to be a success."""
        self.apply(*objects)
        for each in objects:
            if each["kind"] == "Pod":
                name = each["metadata"]["name"]
                self.wait(f"pod/{name}", "jsonpath={.status.phase}=Succeeded", limit_s)

    def ready(self, *objects: Object) -> None:
        self.apply(*objects)
        for each in objects:
            if each["kind"] == "Pod":
                self.wait(f"pod/{each['metadata']['name']}", "condition=Ready")

    def report(self, name: str) -> dict[str, float]:
        """The last report of a pod of `load`; of one that has just begun, zeros."""
        lines = self.kubectl("logs", name, "--tail=40").splitlines()
        reports = ['{"rounds": 0, "errors": 0}', *(line for line in lines if line.startswith("{"))]
        return dict(json.loads(reports[-1]))

    def goes_on(self, *names: str) -> None:
        """Wait until each of these pods of `load` has made a dozen more rounds."""
        for name in names:
            until(partial(self._is_past, name, self.report(name)["rounds"] + 12), f"{name} goes on")

    def _is_past(self, name: str, rounds: float) -> bool:
        return self.report(name)["rounds"] > rounds


def until(condition: Callable[[], bool], what: str, limit_s: float = 180) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it did not in that time.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {limit_s:.0f} s: {what}"
        time.sleep(1)
