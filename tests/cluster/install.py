"""The driver's installation and removal, as an administrator does them: chart or manifests."""

import json
import sys
from pathlib import Path

import yaml

from tests.cluster.cluster import NAMESPACE, Cluster
from tests.cluster.control_plane import AUDIENCE
from tests.support.packaging.manifests import CHART, MANIFESTS

_FILES = Path(__file__).with_name("install")
_WORKLOADS = ("daemonset/fusefs-csi-daemons", "daemonset/fusefs-csi-node")
_CONTROLLER = "deployment/fusefs-csi-controller"
# Run where the API server can be reached.
_HELM = """
import json, sys, helm_python
verb, namespace, chart = sys.argv[1:]
config = helm_python.Config(namespace=namespace)
if verb == "install":
    values = json.load(sys.stdin)
    config.install(chart, "fusefs-csi", values, namespace=namespace)
else:
    config.uninstall("fusefs-csi", wait="watcher", timeout=120)
"""


def install(cluster: Cluster, kind: str, directory: Path) -> None:
    """Install the driver by its `chart` or its `manifests`; returns when nodes can mount."""
    if kind == "chart":
        cluster.kubectl("create", "namespace", NAMESPACE)
        label = "pod-security.kubernetes.io/enforce=privileged"
        cluster.kubectl("label", "namespace", NAMESPACE, label)
        values = yaml.safe_load((_FILES / "values.yaml").read_text())
        repository, _, tag = cluster.image.rpartition(":")
        values["image"] = {"repository": repository, "tag": tag}
        values["stores"] = {"tests": _store(cluster)}
        _helm(cluster, "install", json.dumps(values))
    else:
        directory.mkdir(parents=True, exist_ok=True)
        own = yaml.safe_load((_FILES / "kustomization.yaml").read_text())
        name, _, tag = cluster.image.rpartition(":")
        image = "registry.example.com/fusefs-csi"
        own["images"] = [{"name": image, "newName": name, "newTag": tag}]
        (directory / "kustomization.yaml").write_text(yaml.safe_dump(own))
        lines = [f"{name} = {json.dumps(value)}" for name, value in _store(cluster).items()]
        (directory / "stores.toml").write_text("\n".join(["[stores.tests]", *lines, ""]))
        if not (directory / "manifests").exists():
            (directory / "manifests").symlink_to(MANIFESTS)
        cluster.kubectl("apply", "-k", str(directory))
    for namespace, name, (key, secret) in (
        (NAMESPACE, "fusefs-csi-s3", cluster.controller_keys),
        ("default", "fusefs-s3", cluster.pod_keys),
    ):
        cluster.apply(secret_object(name, key, secret), namespace=namespace)
    for workload in (*_WORKLOADS, _CONTROLLER):
        cluster.kubectl("-n", NAMESPACE, "rollout", "status", workload, "--timeout=300s")


def uninstall(cluster: Cluster, kind: str, directory: Path) -> None:
    """Remove the driver as its documents say; nothing of it is left in the cluster.

    Raises:
        AssertionError: objects are left.
    """
    if kind == "chart":
        _helm(cluster, "uninstall", "")
        cluster.kubectl("delete", "namespace", NAMESPACE)
    else:
        cluster.kubectl("delete", "-k", str(directory), "--timeout=180s")
    kinds = "csidrivers,storageclasses,priorityclasses,clusterroles,clusterrolebindings,namespaces"
    left = [
        line
        for line in cluster.kubectl("get", kinds, "-o", "name").splitlines()
        if "fusefs" in line
    ]
    assert left == [], left


def _store(cluster: Cluster) -> dict[str, str]:
    settings = {"endpoint-url": cluster.store, "region": "us-east-1", "addressing": "path"}
    if cluster.nodes:
        settings |= {"sts-url": cluster.store, "audience": AUDIENCE}
    return settings


def _helm(cluster: Cluster, verb: str, text: str) -> None:
    cluster.run(sys.executable, "-c", _HELM, verb, NAMESPACE, str(CHART), text=text)


def secret_object(name: str, key: str, secret: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "stringData": {"access_key_id": key, "secret_access_key": secret},
    }
