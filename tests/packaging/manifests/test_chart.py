"""The Helm chart: the same objects as the kustomize base and its components, from other values.

Rendered by Helm's own library, which is in a package (helm-python-sdk).
"""

import argparse
import copy
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from csi import main
from csi.volume import stores
from tests.support.packaging.manifests import (
    CHART,
    MANIFESTS,
    VERSIONS,
    Object,
    chart,
    check,
    check_keys,
    cluster_caches,
    container,
    containers,
    every,
    find,
    flag,
    host_path,
    lets_out,
    name_of,
    pod_templates,
    read,
    render,
    render_with,
    rendered,
    stores_file,
    template,
)

helm = pytest.importorskip("helm_python", reason="Helm's library is for x86-64 alone")

MINIO = {"endpoint-url": "https://minio.example.com:9000", "addressing": "path"}
SEAWEEDFS = "http://seaweedfs-s3.fusefs-cache.svc.cluster.local:8333"
GPU = {"name": "gpu", "nodeSelector": {"pool": "gpu"}}
CACHE = {"url": "s3://cache/p", "secretName": "cache-secret"}
STORE_SECRET = "fusefs-csi-store-secret"
KEYS = "csi.storage.k8s.io/provisioner-secret-"
OPENSHIFT: dict[str, Any] = {
    "namespace": {"create": True},
    "openshift": {"enabled": True},
    "selinux": {"type": "spc_t"},
    "networkPolicy": {"enabled": True},
}


# Values, and the components that they stand for.
PAIRS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "base": ({}, []),
    "ephemeral": ({"csiDriver": {"inlineVolumes": True}}, ["ephemeral"]),
    "tokens": (
        {"csiDriver": {"serviceAccountTokens": True, "tokensInSecrets": True}},
        ["service-account-tokens", "tokens-in-secrets"],
    ),
    "pod identity": (
        {
            "csiDriver": {"serviceAccountTokens": True, "podIdentityTokens": True},
            "networkPolicy": {"enabled": True, "podIdentityAgent": True},
        },
        ["network-policy", "aws-pod-identity", "pod-identity-tokens"],
    ),
    "network policy": ({"networkPolicy": {"enabled": True}}, ["network-policy"]),
    "cilium": (
        {
            "networkPolicy": {
                "enabled": True,
                "kind": "cilium",
                "podIdentityAgent": True,
                "namespaces": [],
            }
        },
        ["network-policy-cilium", "aws-pod-identity"],
    ),
    "openshift": (OPENSHIFT, ["network-policy", "openshift", "selinux", "surge"]),
    "openshift with newer kernels": (
        {**OPENSHIFT, "surge": False},
        ["network-policy", "openshift", "selinux"],
    ),
    "openshift with cilium": (
        {
            "namespace": {"create": True},
            "openshift": {"enabled": True},
            "networkPolicy": {"enabled": True, "kind": "cilium"},
        },
        ["network-policy-cilium", "openshift", "surge"],
    ),
    "apparmor": ({"apparmor": {"isUnconfined": True}}, ["apparmor-unconfined"]),
    "surge": ({"surge": True}, ["surge"]),
    "pull secret": ({"imagePullSecrets": [{"name": "fusefs-csi-registry"}]}, ["pull-secret"]),
    "nvme": (
        {"cache": {"hostPath": "/mnt/nvme/fusefs", "isOwnDisk": True, "minFree": "5%"}},
        ["local-nvme"],
    ),
    "cluster cache": (
        {
            "clusterCaches": {
                "training": {
                    "url": "s3://fusefs-cache/training",
                    "endpoint": SEAWEEDFS,
                    "secretName": "fusefs-csi-cluster-cache",
                }
            }
        },
        ["cluster-cache"],
    ),
    "metrics": (
        {"metrics": {"enabled": True, "podMonitor": {"enabled": True}}},
        ["metrics", "pod-monitor"],
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_chart_has_the_objects_of_the_base_and_its_components(
    name: str, tmp_path: Path
) -> None:
    values, components = PAIRS[name]
    expected = render_with(tmp_path, *components) if components else render(MANIFESTS)
    of_chart, of_base = (normal(documents) for documents in (chart(**values), expected))
    if not values.get("namespace"):
        del of_base["Namespace fusefs-csi"]
    if name == "metrics":  # the chart's one policy, where it is enabled, opens the port
        del of_base["NetworkPolicy fusefs-csi-metrics"]
    if name == "pull secret":  # kustomize gives it to the accounts, the chart to the pods
        for key in of_base:
            of_base[key].pop("imagePullSecrets", None)
        assert len(pod_templates_of(of_chart, "imagePullSecrets")) == 3
    assert of_chart.keys() == of_base.keys()
    for key, document in of_base.items():
        assert of_chart[key] == document, key


def pod_templates_of(documents: dict[str, Object], field: str) -> list[Object]:
    """The pod templates with this field, which is taken out."""
    return [
        pod
        for pod in pod_templates(list(documents.values()))
        if pod["spec"].pop(field, None) is not None
    ]


def normal(documents: list[Object]) -> dict[str, Object]:
    """The objects by kind and name, without what the tools themselves add."""
    found = {}
    for document in copy.deepcopy(documents):
        metadata = document["metadata"]
        for label in ("managed-by", "part-of"):
            metadata.get("labels", {}).pop(f"app.kubernetes.io/{label}", None)
        metadata.get("labels", {}).pop("helm.sh/chart", None)
        if not metadata.get("labels"):
            metadata.pop("labels", None)
        if document["kind"] == "ConfigMap":
            metadata["name"] = re.sub(r"-[a-z0-9]{10}$", "", metadata["name"])
            for file in ("stores.toml", "cluster-caches.toml"):
                if file in document["data"]:
                    document["data"][file] = tomllib.loads(document["data"][file])
        for pod in pod_templates(document):
            pod["metadata"]["annotations"].pop("checksum/configuration", None)
            for volume in pod["spec"]["volumes"]:
                for source in [volume, *volume.get("projected", {}).get("sources", [])]:
                    if "configMap" in source:
                        name = source["configMap"]["name"]
                        source["configMap"]["name"] = re.sub(r"-[a-z0-9]{10}$", "", name)
            for each in containers(pod):
                for variable in each.get("env", []):
                    reference = variable.get("valueFrom", {}).get("configMapKeyRef", {})
                    if reference:
                        reference["name"] = re.sub(r"-[a-z0-9]{10}$", "", reference["name"])
                # Their order means nothing to the programs.
                each.get("args", []).sort()
                each["volumeMounts"].sort(key=lambda mount: str(mount["mountPath"]))
            for list_of_names in ("containers", "volumes"):
                pod["spec"][list_of_names].sort(key=lambda each: str(each["name"]))
        found[f"{document['kind']} {name_of(document)}"] = document
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_with_all_that_can_be_had(version: str) -> None:
    for document in chart(**EVERYTHING):
        check(document, version)


EVERYTHING: dict[str, Any] = {
    "namespace": {"create": True},
    "imagePullSecrets": [{"name": "registry"}],
    "stores": {"minio": {**MINIO, "sts-url": "https://minio.example.com:9001", "audience": "m"}},
    "certificates": {"minio-ca.pem": "-----BEGIN CERTIFICATE-----\n"},
    "clusterCaches": {
        "*": CACHE,
        "training": {**CACHE, "endpoint": "http://ceph.example.com:7480"},
    },
    "csiDriver": {"inlineVolumes": True, "serviceAccountTokens": True, "podIdentityTokens": True},
    "serviceAccounts": {"node": {"annotations": {"eks.amazonaws.com/role-arn": "arn:x"}}},
    "env": {"HTTPS_PROXY": "http://proxy:3128"},
    "controller": {
        "secretName": "fusefs-csi-s3",
        "nodeSelector": {"pool": "infra"},
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
        "resources": {"requests": {"cpu": "1"}},
    },
    "imagePullPolicy": "Always",
    "labels": {"team": "storage"},
    "podAnnotations": {"example.com/scrape": "yes"},
    "logLevel": "debug",
    "nodePools": [
        {"name": "gpu", "nodeSelector": {"pool": "gpu"}, "extraArgs": ["--max-volumes=10"]},
        {"name": "cpu", "nodeSelector": {"pool": "cpu"}, "cache": {"minFree": "30%"}},
    ],
    "surge": True,
    "networkPolicy": {
        "enabled": True,
        "ports": [3128],
        "namespaces": [{"name": "seaweedfs", "ports": [8333]}],
        "podIdentityAgent": True,
    },
    "selinux": {"type": "spc_t"},
    "apparmor": {"isUnconfined": True},
    "openshift": {"enabled": True},
    "metrics": {"enabled": True, "podMonitor": {"enabled": True, "labels": {"release": "p"}}},
}


def test_helm_finds_no_fault() -> None:
    for values in ({}, EVERYTHING):
        report = helm.lint(
            str(CHART), values, strict=True, namespace="fusefs-csi", kube_version="v1.31.0"
        )
        assert report["errors"] == []
        messages = [message for message in report["messages"] if "icon" not in message["error"]]
        assert messages == []


def test_what_administrators_set_is_everywhere() -> None:
    documents = chart(**EVERYTHING)
    assert all(each["metadata"]["labels"]["team"] == "storage" for each in documents)
    pods = list(pod_templates(documents))
    assert len(pods) == 5
    for pod in pods:
        assert pod["metadata"]["labels"]["team"] == "storage"
        assert pod["metadata"]["annotations"]["example.com/scrape"] == "yes"
        assert {each["imagePullPolicy"] for each in containers(pod)} == {"Always"}
        assert flag(pod["spec"]["containers"][0], "log-level") == "debug"
    controller = template(documents, "fusefs-csi-controller")
    assert controller["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "infra"}
    assert "requiredDuringSchedulingIgnoredDuringExecution" in str(controller["spec"]["affinity"])
    assert container(controller, "driver")["resources"]["requests"]["cpu"] == "1"


@pytest.mark.parametrize(
    ("kernels", "is_surging"),
    [
        (["6.12.40-63.amzn2023.x86_64", "6.8.0-1021-aws"], True),
        (["5.14.0-427.el9.x86_64"], True),
        (["6.9.0", "7.0-rc1", "10.0.20348.2159"], False),
    ],
)
def test_the_kernels_of_the_nodes_choose_the_roll_out(
    kernels: list[str], is_surging: bool, tmp_path: Path
) -> None:
    nodes = [
        {"metadata": {"name": f"n{i}"}, "status": {"nodeInfo": {"kernelVersion": kernel}}}
        for i, kernel in enumerate(kernels)
    ]
    shutil.copytree(CHART, tmp_path / "chart")
    helpers = tmp_path / "chart/templates/_helpers.tpl"
    asked = '(lookup "v1" "Node" "" "")'
    assert helpers.read_text().count(asked) == 1
    answer = f"(fromJson `{json.dumps({'items': nodes})}`)"
    helpers.write_text(helpers.read_text().replace(asked, answer))
    for chosen in ("auto", False):
        parts = rendered({"surge": chosen}, tmp_path / "chart")
        [notes] = (text for path, text in parts.items() if path.endswith("NOTES.txt"))
        [sets] = (text for path, text in parts.items() if path.endswith("daemons.yaml"))
        daemons = find(read(sets), "DaemonSet")["spec"]
        surge = daemons["updateStrategy"]["rollingUpdate"]["maxSurge"]
        assert surge == int(is_surging and chosen == "auto")
        assert ("before 6.9" in notes) == is_surging
        assert ("ENDS ALL MOUNTS" in notes) == (is_surging and chosen is False)


def test_the_controller_may_read_the_secrets_that_classes_name(tmp_path: Path) -> None:
    of_class = {f"{KEYS}name": "mine", f"{KEYS}namespace": "fusefs-csi"}
    classes = [{"name": "a", "parameters": {"bucket": "b", **of_class}}]
    for values, expected in (({}, ["mine"]), ({"secretName": "other"}, ["mine", "other"])):
        role = find(chart(storageClasses=classes, controller=values), "Role", STORE_SECRET)
        assert role["rules"][0]["resourceNames"] == expected
    assert STORE_SECRET not in map(name_of, every(chart(), "Role"))


def test_pools_have_their_own_caches_and_flags(tmp_path: Path) -> None:
    documents = chart(
        nodePools=[
            {
                "name": "gpu",
                "nodeSelector": {"pool": "gpu"},
                "cache": {"hostPath": "/mnt/nvme/fusefs", "isOwnDisk": True},
                "extraArgs": ["--memory-limit=1GiB"],
            },
            {"name": "cpu", "nodeSelector": {"pool": "cpu"}},
        ],
        node={"extraArgs": ["--max-volumes=20"]},
    )
    sets = every(documents, "DaemonSet")
    assert sorted(map(name_of, sets)) == [
        f"fusefs-csi-{kind}-{pool}" for kind in ("daemons", "node") for pool in ("cpu", "gpu")
    ]
    for each in sets:
        labels = each["spec"]["template"]["metadata"]["labels"]
        selector = each["spec"]["selector"]["matchLabels"]
        assert selector.items() <= labels.items()
        assert selector["fusefs.dev/pool"] in name_of(each)
    gpu, cpu = (template(documents, f"fusefs-csi-node-{pool}") for pool in ("gpu", "cpu"))
    assert gpu["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux", "pool": "gpu"}
    assert flag(container(gpu, "driver"), "memory-limit") == "1GiB"
    assert flag(container(gpu, "driver"), "cache-host-path") == "/mnt/nvme/fusefs"
    daemons = container(template(documents, "fusefs-csi-daemons-gpu"), "daemons")
    assert flag(daemons, "cache-host-path") == "/mnt/nvme/fusefs"
    assert str(host_path(gpu, "cache")) == "/mnt/nvme/fusefs"
    assert str(host_path(cpu, "cache")) == "/var/lib/fusefs-csi/cache"
    for pod in (gpu, cpu):
        assert flag(container(pod, "driver"), "max-volumes") == "20"


def test_stores_become_the_file_that_the_driver_reads(tmp_path: Path) -> None:
    given = {**MINIO, "audience": 'odd "audience" <'}
    documents = chart(stores={"minio": {**MINIO, "region": "eu-west-9"}})
    known = stores.read_stores(stores_file(documents, tmp_path)).choose("minio")
    assert (known.endpoint_url, known.region) == (MINIO["endpoint-url"], "eu-west-9")
    odd = find(chart(stores={"minio": given}), "ConfigMap", "fusefs-csi-stores")
    assert tomllib.loads(odd["data"]["stores.toml"])["stores"]["minio"] == given


def test_cluster_caches_become_the_file_that_the_driver_reads(tmp_path: Path) -> None:
    documents = chart(clusterCaches={"a.b": {**CACHE, "endpoint": SEAWEEDFS}, "*": CACHE})
    known = cluster_caches(documents, tmp_path)
    assert known.by_domain.keys() == {"a.b", "*"}
    assert known.by_domain["a.b"].settings["cluster_cache_endpoint"] == SEAWEEDFS
    assert known.by_domain["*"].settings == {"cluster_cache": CACHE["url"]}


def test_the_cluster_cache_that_is_shown_is_taken(tmp_path: Path) -> None:
    text = (MANIFESTS.parent / "docs/guides/cluster-cache.md").read_text()
    [shown] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    [values] = read(shown)
    documents = chart(**values)
    [cache] = values["clusterCaches"].values()
    assert lets_out(find(documents, "NetworkPolicy"), cache["endpoint"])
    of_component = cluster_caches(render_with(tmp_path, "cluster-cache"), tmp_path)
    assert of_component.by_domain.keys() == values["clusterCaches"].keys()


def test_another_cluster_cache_rolls_the_pods_that_read_it() -> None:
    for name, is_rolled in (("fusefs-csi-node", True), ("fusefs-csi-daemons", False)):
        one, other = (
            template(chart(clusterCaches=given), name)["metadata"]["annotations"]
            for given in ({"a": CACHE}, {"b": CACHE})
        )
        assert (
            one.get("checksum/configuration") != other.get("checksum/configuration")
        ) == is_rolled


@pytest.mark.parametrize("kind", ["kubernetes", "cilium"])
def test_the_policy_lets_out_every_store(kind: str) -> None:
    values = copy.deepcopy(EVERYTHING)
    values["networkPolicy"]["kind"] = kind
    documents = chart(**values)
    name = {"kubernetes": "NetworkPolicy", "cilium": "CiliumNetworkPolicy"}[kind]
    policy = find(documents, name)
    for url in (
        "https://s3.amazonaws.com",
        "https://minio.example.com:9000",
        "https://minio.example.com:9001",
        "http://ceph.example.com:7480",
        "http://proxy.example.com:3128",
        "http://s3.seaweedfs.svc.cluster.local:8333",
    ):
        assert lets_out(policy, url), url
    assert not lets_out(policy, "https://minio.example.com:9002")


def test_the_program_understands_the_charts_arguments() -> None:
    parser: argparse.ArgumentParser = main.make_parser()
    for pod in pod_templates(chart(**EVERYTHING)):
        for each in containers(pod):
            if "fusefs-csi:" in each["image"]:
                parser.parse_args(each["args"])


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"storageClass": []}, "storageClass"),
        ({"stores": {"minio": {"endpoint": "https://minio"}}}, "endpoint"),
        ({"stores": {"minio": {**MINIO, "sts-url": "https://sts"}}}, "audience"),
        ({"stores": {"minio": {"region": "us-east-1"}}}, "endpoint-url"),
        ({"stores": {"minio": {**MINIO, "region": ""}}}, "region"),
        ({"stores": {"minio": {**MINIO, "ca-bundle": "/etc/fusefs-csi/ca.pem"}}}, "ca.pem"),
        ({"certificates": {"stores.toml": ""}}, "stores.toml"),
        ({"cache": {"minFree": "100Gi"}}, "minFree"),
        ({"cache": {"minFree": "100%"}}, "minFree"),
        ({"cache": {"hostPath": "/mnt/a, b"}}, "hostPath"),
        ({"env": {"A B": "x"}}, "A B"),
        ({"image": {"repository": "a", "tag": ""}}, "digest"),
        ({"clusterCaches": {"a": {"url": "s3://cache"}}}, "secretName"),
        ({"clusterCaches": {"a": {**CACHE, "url": "https://cache"}}}, "url"),
        ({"clusterCaches": {"a/b": CACHE}}, "a/b"),
        ({"nodePools": [{"name": "gpu"}]}, "nodeSelector"),
        ({"nodePools": [GPU, {**GPU, "nodeSelector": {"pool": "cpu"}}]}, "two pools are named gpu"),
        ({"nodePools": [GPU, {**GPU, "name": "other"}]}, "other and gpu"),
        (
            {"nodePools": [GPU, {"name": "a", "nodeSelector": {"pool": "gpu", "zone": "a"}}]},
            "gpu and a",
        ),
        (
            {"nodePools": [{"name": "all", "nodeSelector": {"kubernetes.io/os": "linux"}}, GPU]},
            "all and gpu",
        ),
        ({"networkPolicy": {"kind": "calico"}}, "kind"),
        ({"node": {"extraArgs": ["memory-limit=1GiB"]}}, "extraArgs"),
        ({"kubeletDir": "var/lib/kubelet"}, "kubeletDir"),
        ({"kubeletDir": "/var/lib/kubelet #1"}, "kubeletDir"),
        ({"image": {"digest": "sha256:abc"}}, "digest"),
        ({"metrics": {"podMonitor": {"enabled": True}}}, "metrics.enabled"),
        ({"csiDriver": {"tokensInSecrets": True}}, "serviceAccountTokens"),
        ({"surge": "always"}, "surge"),
        (
            {"storageClasses": [{"name": "a", "parameters": {"bucket": "b", f"{KEYS}name": "s"}}]},
            "a: the provisioner Secret has to be one of the namespace fusefs-csi",
        ),
        ({"surge": True, "daemons": {"maxUnavailable": 2}}, "maxUnavailable"),
    ],
)
def test_values_that_mean_nothing_are_refused(values: dict[str, Any], word: str) -> None:
    with pytest.raises(helm.HelmError, match=word):
        chart(**values)


@pytest.mark.parametrize(("name", "kind"), [("123", "kubernetes"), ("true", "cilium")])
def test_a_name_that_looks_like_a_number_stays_a_name(name: str, kind: str) -> None:
    documents = chart(
        storageClasses=[{"name": name, "parameters": {"bucket": name}}],
        networkPolicy={
            "enabled": True,
            "kind": kind,
            "namespaces": [{"name": name, "ports": [8333]}],
        },
        clusterCaches={name: {**CACHE, "secretName": name}},
        certificates={name: "text"},
        env={"NO": name},
        nodes={"selector": None},
        nodePools=[{"name": name, "nodeSelector": {"pool": name}}],
    )
    for document in documents:
        check(document, VERSIONS[0])
    [named] = every(documents, "StorageClass")
    assert name_of(named) == name


def test_the_values_that_are_shown_are_taken(tmp_path: Path) -> None:
    text = (CHART / "README.md").read_text()
    shown = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(shown) == 2
    for block in shown:
        [values] = read(block)
        documents = chart(**values)
        for document in documents:
            check(document, VERSIONS[0])
    [values] = read(shown[0])
    documents = chart(**values)
    check_keys(documents, stores_file(documents, tmp_path))
    # The Secrets are those that the commands above it make.
    text = text.partition("helm install")[0]
    assert "for namespace in fusefs-csi default" in text
    [made] = re.findall(r"create secret generic (\S+)", text)
    [parameters] = (each["parameters"] for each in every(documents, "StorageClass"))
    assert {v for k, v in parameters.items() if k.endswith("-secret-name")} == {made}
