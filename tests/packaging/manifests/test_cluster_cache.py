"""The component that gives the driver a cluster cache, and the SeaweedFS that can be its store."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from csi.identities.cluster_caches import read_cluster_caches
from tests.support.packaging.documents import shell_blocks
from tests.support.packaging.manifests import (
    MANIFESTS,
    POLICIES,
    PROJECT,
    VERSIONS,
    Object,
    check,
    cluster_caches,
    containers,
    every,
    find,
    lets_out,
    name_of,
    pod_templates,
    render,
    render_with,
)

SEAWEEDFS = MANIFESTS / "seaweedfs"
WEED = Path(sys.prefix) / "bin" / "weed"
NAMESPACE = "fusefs-cache"
DOCUMENTS = [PROJECT / "docs" / name / "cluster-cache.md" for name in ("guides", "operate")]


@pytest.fixture
def seaweedfs() -> list[Object]:
    return render(SEAWEEDFS)


def workloads(documents: list[Object]) -> dict[str, Object]:
    kinds = ("StatefulSet", "DaemonSet", "Job")
    return {name_of(each): each for kind in kinds for each in every(documents, kind)}


def commands(documents: list[Object]) -> dict[str, list[str]]:
    """The command lines of weed, by its command."""
    found = {}
    for pod in pod_templates(documents):
        for each in containers(pod):
            if each["command"][0] == "weed":
                [name] = (word for word in each["command"][1:] if not word.startswith("-"))
                found[name] = each["command"]
    return found


def test_the_driver_finds_the_files_that_its_cluster_cache_names(tmp_path: Path) -> None:
    documents = render_with(tmp_path, "cluster-cache")
    (tmp_path / "there").mkdir()
    [cache] = cluster_caches(documents, tmp_path / "there").by_domain.values()
    assert cache.settings["cluster_cache"].startswith(f"s3://{bucket()}/")


@pytest.mark.parametrize("policy", ["network-policy", "network-policy-cilium"])
def test_the_driver_may_call_the_seaweedfs_that_it_names(
    policy: str, tmp_path: Path, seaweedfs: list[Object]
) -> None:
    documents = render_with(tmp_path, policy, "cluster-cache")
    [egress] = (each for each in documents if each["kind"] in POLICIES)
    text = (MANIFESTS / "components/cluster-cache/cluster-caches.toml").read_text()
    [url] = re.findall(r'endpoint = "(.*)"', text)
    assert lets_out(egress, url)
    [name, namespace, port] = re.findall(r"//([\w-]+)\.([\w-]+)\.svc\..*:(\d+)", url)[0]
    service = find(seaweedfs, "Service", name)
    assert service["metadata"]["namespace"] == namespace == NAMESPACE
    assert [each["port"] for each in service["spec"]["ports"]] == [int(port)]
    own, driver = find(seaweedfs, "NetworkPolicy")["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {}}]}
    [let_in] = driver["from"]
    assert let_in["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "fusefs-csi"
    }
    assert [each["port"] for each in driver["ports"]] == [int(port)]


# Programs that the document calls, and that a test must not.
PLAYED = """
kubectl() { :; }
ssh() { :; }
openssl() { head -c 20 /dev/urandom | base64; }
"""


def test_the_commands_that_are_shown_make_secrets_that_both_sides_take(tmp_path: Path) -> None:
    shown = [block for document in DOCUMENTS for block in shell_blocks(document)]
    blocks = [block for block in shown if "cat > " in block]
    assert len(blocks) == 2
    subprocess.run(["bash", "-euc", "\n".join([PLAYED, *blocks])], cwd=tmp_path, check=True)
    for name in ("credentials", "key", "s3.json"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    text = (MANIFESTS / "components/cluster-cache/cluster-caches.toml").read_text()
    file = tmp_path / "cluster-caches.toml"
    file.write_text(text.replace("/etc/fusefs-csi-cluster-caches/training", str(tmp_path)))
    [cache] = read_cluster_caches(file).by_domain.values()
    [identity] = json.loads((tmp_path / "s3.json").read_text())["identities"]
    [keys] = identity["credentials"]
    held = cache.secrets().credentials.decode()
    assert f"= {keys['accessKey']}\n" in held
    assert f"= {keys['secretKey']}\n" in held


@pytest.mark.parametrize("version", VERSIONS)
def test_its_objects_are_valid(seaweedfs: list[Object], version: str) -> None:
    for document in seaweedfs:
        check(document, version)
        assert document["metadata"].get("namespace", NAMESPACE) == NAMESPACE


def test_its_parts_call_each_other_by_the_names_that_they_have(seaweedfs: list[Object]) -> None:
    headless = {
        name_of(each): {port["port"] for port in each["spec"]["ports"]}
        for each in every(seaweedfs, "Service")
        if each["spec"].get("clusterIP") == "None"
    }
    called = re.findall(r"([\w-]+)-0\.([\w-]+):(\d+)", json.dumps(workloads(seaweedfs)))
    assert {workload for workload, _, _ in called} == {"seaweedfs-master", "seaweedfs-filer"}
    for workload, service, port in called:
        assert workload == service
        # It calls the gRPC port as well, which is so far above.
        assert headless[service] == {int(port), int(port) + 10_000}


def test_its_pods_have_few_rights(seaweedfs: list[Object]) -> None:
    for pod in pod_templates(seaweedfs):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostPID", "hostIPC", "hostNetwork"} & spec.keys()
        is_on_host = any("hostPath" in volume for volume in spec["volumes"])
        assert spec["securityContext"].get("runAsNonRoot", False) is not is_on_host
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in containers(pod):
            context = each["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_weed_has_each_flag_that_is_used(seaweedfs: list[Object]) -> None:
    found = commands(seaweedfs)
    assert found.keys() == {"master", "filer", "volume", "s3"}
    for name, command in found.items():
        helped = subprocess.run([WEED, "help", name], capture_output=True, text=True)
        known = set(re.findall(r"^  -([\w.]+)", helped.stdout + helped.stderr, re.MULTILINE))
        used = {word[1:].partition("=")[0] for word in command[command.index(name) + 1 :]}
        assert used <= known, name


def bucket() -> str:
    text = (SEAWEEDFS / "bucket.yaml").read_text()
    [name] = re.findall(r"s3\.bucket\.create -name=(\S+)", text)
    lifetime = f"-locationPrefix=/buckets/{name}/ -replication=000 -ttl=14d "
    assert lifetime in (SEAWEEDFS / "bucket.txt").read_text()
    return str(name)
