"""Kubernetes objects for tests: rendered by kustomize, read from YAML, checked against schemas."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from csi.identities.cluster_caches import ClusterCaches, read_cluster_caches
from csi.volume import location, stores
from csi.volume.options import read_options

PROJECT = Path(__file__).parents[3]
MANIFESTS = PROJECT / "manifests"
CHART = PROJECT / "charts/fusefs-csi"
OVERLAYS = sorted((MANIFESTS / "overlays").iterdir())
# The oldest version that the manifests are for, and the newest whose schemas are known.
VERSIONS = ("1.31", "1.37")
WORKLOADS = ("Deployment", "DaemonSet")

# What a cluster cache's Secret has.
SECRETS = {
    "credentials": "[default]\naws_access_key_id = a\naws_secret_access_key = b\n",
    "key": "sixteen-bytes-or-more",
}

Object = dict[str, Any]

each_kustomization = pytest.mark.parametrize(
    "directory", [MANIFESTS, *OVERLAYS], ids=lambda path: path.name
)


def render_with(directory: Path, *components: str, more: str = "") -> list[Object]:
    """The base with these components, as a cluster's own kustomization would have it.

    `directory` is empty, and `more` is added to the kustomization.
    """
    lines = [
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        "resources: [manifests/base]",
        "components:",
        *(f"  - manifests/components/{name}" for name in components),
    ]
    (directory / "manifests").symlink_to(MANIFESTS)
    (directory / "kustomization.yaml").write_text("\n".join([*lines, more]))
    return render(directory)


@functools.cache
def render(directory: Path) -> list[Object]:
    """What `kubectl apply -k DIRECTORY` would send."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run([kubectl, "kustomize", directory], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def chart(**values: Any) -> list[Object]:
    """What `helm template` prints with these values; skips where Helm's library is missing."""
    parts = rendered(values, CHART)
    texts = [text for path, text in sorted(parts.items()) if not path.endswith("NOTES.txt")]
    return [document for text in texts for document in read(text)]


def rendered(values: dict[str, Any], path: Path) -> dict[str, str]:
    """The chart's files with these values, by their names."""
    helm = pytest.importorskip("helm_python", reason="Helm's library is for x86-64 alone")
    parts: dict[str, str] = helm.Chart.load(str(path)).render(
        values, name="fusefs-csi", namespace="fusefs-csi"
    )
    return parts


def check_keys(documents: list[Object], stores_toml: Path) -> None:
    """Check that each class names a known store, and Secrets that its readers may read."""
    known = stores.read_stores(stores_toml)
    role = find(documents, "Role", "fusefs-csi-store-secret")
    for storage_class in every(documents, "StorageClass"):
        parameters = storage_class["parameters"]
        for use in ("provisioner", "controller-expand"):
            secret = parameters[f"csi.storage.k8s.io/{use}-secret-name"]
            assert secret in role["rules"][0]["resourceNames"]
            assert parameters[f"csi.storage.k8s.io/{use}-secret-namespace"] == "fusefs-csi"
        assert parameters["csi.storage.k8s.io/node-publish-secret-namespace"] == "${pvc.namespace}"
        store = known.choose(parameters["store"])
        assert store.endpoint_url is not None


def own_parameters(storage_class: Object) -> dict[str, str]:
    """The parameters that the driver gets, without those of the provisioner."""
    return {
        name: value
        for name, value in storage_class["parameters"].items()
        if not name.startswith("csi.storage.k8s.io/")
    }


def check_classes(documents: list[Object], stores_toml: Path) -> None:
    """Check that the driver understands each class, which keeps the data of its volumes."""
    known = stores.read_stores(stores_toml)
    names = {"pvc.namespace": "team", "pvc.name": "data", "pv.name": "pvc-1"}
    for storage_class in every(documents, "StorageClass"):
        parameters = own_parameters(storage_class)
        assert parameters.pop("onDelete") == "retain"
        place = {key: parameters.pop(key) for key in location.LOCATION_KEYS & parameters.keys()}
        place["prefix"] = location.fill_in(place["prefix"], names)
        place["bucket"] = place["bucket"].replace("SET-YOUR-BUCKET", "bucket")
        location.location_of(place, known)
        read_options(parameters, storage_class.get("mountOptions", []), is_inline=False)


def cluster_caches(documents: list[Object], directory: Path) -> ClusterCaches:
    """What the driver reads of its cluster caches; it and Secrets are written to `directory`."""
    pod = template(documents, "fusefs-csi-node")
    driver = container(pod, "driver")
    [mount] = (each for each in driver["volumeMounts"] if each["name"] == "cluster-caches")
    [volume] = (each for each in pod["spec"]["volumes"] if each["name"] == "cluster-caches")
    assert (mount["readOnly"], volume["projected"]["defaultMode"]) == (True, 0o400)
    file = Path(flag(driver, "cluster-caches"))
    assert file.parent == Path(mount["mountPath"])
    for source in volume["projected"]["sources"]:
        if "configMap" in source:
            text = find(documents, "ConfigMap", source["configMap"]["name"])["data"][file.name]
            (directory / file.name).write_text(text.replace(str(file.parent), str(directory)))
        for item in source.get("secret", {}).get("items", []):
            (directory / item["path"]).parent.mkdir(exist_ok=True)
            (directory / item["path"]).write_text(SECRETS[item["key"]])
    # The controller, which mounts nothing, and the daemons, which are given them, have none.
    for name in ("fusefs-csi-daemons", "fusefs-csi-controller"):
        assert "cluster-cache" not in str(template(documents, name))
    return read_cluster_caches(directory / file.name)


def stores_file(documents: list[Object], directory: Path) -> Path:
    """The file of stores that the driver reads, with a certificate that is there."""
    [text] = (
        each["data"]["stores.toml"]
        for each in every(documents, "ConfigMap")
        if "stores.toml" in each["data"]
    )
    certificate, path = directory / "ca.pem", directory / "stores.toml"
    certificate.touch()
    path.write_text(text.replace("/etc/fusefs-csi/ca.pem", str(certificate)))
    return path


def read(text: str) -> list[Object]:
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


# Resources of operators and plugins, whose schemas are not Kubernetes' own.
CUSTOM_GROUPS = ("cilium.io/", "kubeflow.org/", "monitoring.coreos.com/", "ray.io/")


def check(document: Object, version: str) -> None:
    """Raises kubernetes_validate.ValidationError; unknown fields count as errors."""
    if document["apiVersion"].startswith(CUSTOM_GROUPS):
        return
    _check(json.dumps(document, sort_keys=True), version)


@functools.cache  # most objects are the same in many overlays
def _check(document: str, version: str) -> None:
    _validator().validate(json.loads(document), version, strict=True)


@functools.cache
def _validator() -> Any:
    """Kubernetes' schemas: 2.5 s to import, large files that it would read for each object."""
    import kubernetes_validate.utils

    utils = kubernetes_validate.utils
    utils.schema_contents = functools.cache(utils.schema_contents)
    return kubernetes_validate


def find(documents: list[Object], kind: str, name: str | None = None) -> Object:
    """The only object of that kind (and name)."""
    [found] = (document for document in every(documents, kind) if name in (None, name_of(document)))
    return found


def every(documents: list[Object], kind: str) -> list[Object]:
    return [document for document in documents if document["kind"] == kind]


POLICIES = ("NetworkPolicy", "CiliumNetworkPolicy")


def name_of(document: Object) -> str:
    return str(document["metadata"]["name"])


def template(documents: list[Object], workload: str) -> Object:
    """The pods of one Deployment or DaemonSet."""
    [found] = (
        document["spec"]["template"]
        for kind in WORKLOADS
        for document in every(documents, kind)
        if name_of(document) == workload
    )
    return found


def pod_templates(value: Any) -> Iterator[Object]:
    """Every pod template at any depth of an object."""
    if isinstance(value, dict):
        if isinstance(value.get("spec"), dict) and "containers" in value["spec"]:
            yield value
        else:
            for inner in value.values():
                yield from pod_templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pod_templates(inner)


def containers(pod: Object) -> list[Object]:
    spec = pod["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def container(pod: Object, name: str) -> Object:
    [found] = (each for each in containers(pod) if each["name"] == name)
    return found


def flag(where: Object, name: str) -> str:
    """The value of `--name=value` among a container's arguments."""
    [value] = (
        argument.partition("=")[2]
        for argument in where["args"]
        if argument.partition("=")[0] == f"--{name}"
    )
    return str(value)


def host_path(pod: Object, volume: str) -> Path | None:
    """Where a volume is on the host; None for other kinds of volumes."""
    [found] = (each for each in pod["spec"]["volumes"] if each["name"] == volume)
    return Path(found["hostPath"]["path"]) if "hostPath" in found else None


def on_host(pod: Object, where: Object, path: Path) -> Path | None:
    """What a path in a container is on the host; None if it is not the host's."""
    mounts = [
        (Path(mount["mountPath"]), mount["name"])
        for mount in where.get("volumeMounts", [])
        if path.is_relative_to(mount["mountPath"])
    ]
    if not mounts:
        return None
    mountpoint, volume = max(mounts, key=lambda mount: len(mount[0].parts))
    base = host_path(pod, volume)
    return base / path.relative_to(mountpoint) if base else None


def lets_out(policy: Object, url: str) -> bool:
    """True if a NetworkPolicy, or a CiliumNetworkPolicy, lets a pod call this URL.

    A host of the form NAME.NAMESPACE.svc is in the cluster, which CIDR rules do not reach.
    """
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    names = (parts.hostname or "").split(".")
    namespace = names[1] if "svc" in names[2:3] else None
    return any(
        port in _ports(way) and _reaches(way, namespace) for way in policy["spec"].get("egress", [])
    )


def _ports(way: Object) -> set[int]:
    given = [*way.get("ports", []), *(p for to in way.get("toPorts", []) for p in to["ports"])]
    return {int(each["port"]) for each in given}


def _reaches(way: Object, namespace: str | None) -> bool:
    if namespace is None:
        blocks = [peer["ipBlock"]["cidr"] for peer in way.get("to", []) if "ipBlock" in peer]
        return "0.0.0.0/0" in [*blocks, *(each["cidr"] for each in way.get("toCIDRSet", []))]
    labels = [peer.get("namespaceSelector", {}).get("matchLabels") for peer in way.get("to", [])]
    selectors = [each["matchLabels"] for each in way.get("toEndpoints", [])]
    return {"kubernetes.io/metadata.name": namespace} in labels or {
        "k8s:io.kubernetes.pod.namespace": namespace
    } in selectors
