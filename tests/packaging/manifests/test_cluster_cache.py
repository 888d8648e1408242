"""The component that gives the driver a cluster cache, and the SeaweedFS that can be its store."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from csi.identities.cluster_caches import read_cluster_caches
from tests.support.packaging.documents import shell_blocks
from tests.support.packaging.manifests import (
    MANIFESTS,
    POLICIES,
    PROJECT,
    VERSIONS,
    Object,
    check,
    container,
    containers,
    every,
    find,
    flag,
    lets_out,
    name_of,
    pod_templates,
    render,
    render_with,
    template,
)
from tests.support.servers.s3_server import ServerError, free_ports, is_free, spawn
from tests.support.sharing import PATIENCE_S

SEAWEEDFS = MANIFESTS / "seaweedfs"
WEED = Path(sys.prefix) / "bin" / "weed"
NAMESPACE = "fusefs-cache"
DOCUMENTS = [PROJECT / "docs" / name / "cluster-cache.md" for name in ("guides", "operate")]
KEYS = ("cache-access", "cache-secret")


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
    pod = template(documents, "fusefs-csi-node")
    driver = container(pod, "driver")
    [mount] = (each for each in driver["volumeMounts"] if each["name"] == "cluster-caches")
    [volume] = (each for each in pod["spec"]["volumes"] if each["name"] == "cluster-caches")
    assert volume["projected"]["defaultMode"] == 0o400
    file = Path(flag(driver, "cluster-caches"))
    assert file.parent == Path(mount["mountPath"])
    there = tmp_path / "there"
    for source in volume["projected"]["sources"]:
        if "configMap" in source:
            config = find(documents, "ConfigMap", source["configMap"]["name"])["data"]
            there.mkdir()
            text = config[file.name].replace(mount["mountPath"], str(there))
            (there / file.name).write_text(text)
        for item in source.get("secret", {}).get("items", []):
            (there / item["path"]).parent.mkdir(exist_ok=True)
            (there / item["path"]).write_text(example(item["key"]))
    [cache] = read_cluster_caches(there / file.name).by_domain.values()
    assert cache.url.startswith(f"s3://{bucket()}/")
    for name in ("fusefs-csi-daemons", "fusefs-csi-controller"):
        assert "cluster-cache" not in str(template(documents, name))


def example(item: str) -> str:
    keys = "[default]\naws_access_key_id = a\naws_secret_access_key = b\n"
    return {"credentials": keys, "key": "sixteen-bytes-or-more"}[item]


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
    assert f"-locationPrefix=/buckets/{name}/ " in (SEAWEEDFS / "bucket.txt").read_text()
    return str(name)


class Local:
    """The manifests' own commands on loopback, with files below a directory."""

    def __init__(self, documents: list[Object], directory: Path) -> None:
        self._documents = documents
        self._directory = directory
        names = ("master", "filer", "volume", "s3")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._defaults = {"master": 9333, "filer": 8888, "volume": 8080, "s3": 8333}
        self.processes: list[subprocess.Popen[bytes]] = []
        (directory / "s3.json").write_text(identities())
        (directory / "bucket.txt").write_text((SEAWEEDFS / "bucket.txt").read_text())

    def start(self) -> None:
        """Returns when all of them listen.

        Raises:
            ServerError: one has ended, for another program has taken one of its ports.
        """
        for name in ("master", "volume", "filer", "s3"):
            self._start(name)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for port in self.ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    def _start(self, name: str) -> None:
        directory = self._directory / name
        directory.mkdir()
        words = [self.here(word, directory) for word in commands(self._documents)[name]]
        log = self._directory / f"{name}.log"
        self.processes.append(spawn([str(WEED), *words[1:]], log))
        deadline = time.monotonic() + PATIENCE_S
        while is_free(self.ports[name]):
            if self.processes[-1].poll() is not None or time.monotonic() > deadline:
                raise ServerError(log.read_text()[-1000:])
            time.sleep(0.05)

    def here(self, text: str, directory: Path) -> str:
        """What a word of a command is on this machine."""
        text = re.sub(r"(\$\(POD_NAME\)|seaweedfs-\w+-0)\.seaweedfs-\w+|\$\(POD_IP\)", HOST, text)
        text = text.replace("0.0.0.0", HOST).replace("$(NODE_NAME)", "node-1")
        text = text.replace("/etc/seaweedfs-s3", str(self._directory))
        text = text.replace("/etc/seaweedfs-bucket", str(self._directory))
        text = re.sub(r"=/data$", f"={directory}", text)
        for name, port in self._defaults.items():
            text = re.sub(rf"(?<=[:=]){port}\b", str(self.ports[name]), text)
        return text

    def make_bucket(self) -> subprocess.CompletedProcess[str]:
        """What the Job runs."""
        [job] = every(self._documents, "Job")
        [each] = containers(job["spec"]["template"])
        words = [self.here(word, self._directory) for word in each["command"]]
        environment = {**os.environ, "PATH": f"{WEED.parent}:{os.environ['PATH']}"}
        return subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
        )

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=f"http://{HOST}:{self.ports['s3']}",
            region_name="us-east-1",
            aws_access_key_id=KEYS[0],
            aws_secret_access_key=KEYS[1],
            config=Config(s3={"addressing_style": "path"}),
        )


HOST = "127.0.0.1"


def identities() -> str:
    """The file s3.json that the document has one make, with keys of ours."""
    [found] = re.findall(r"^\{\"identities\".*\}$", DOCUMENTS[1].read_text(), re.MULTILINE)
    return str(found).replace("$access", KEYS[0]).replace("$secret", KEYS[1])


@pytest.fixture
def local(seaweedfs: list[Object], tmp_path: Path) -> Iterator[Local]:
    for attempts_left in (2, 1, 0):
        directory = tmp_path / f"{attempts_left}"
        directory.mkdir()
        made = Local(seaweedfs, directory)
        try:
            made.start()
            yield made
            return
        except ServerError:
            if not attempts_left:
                raise
        finally:
            made.stop()


def test_the_commands_make_a_cluster_cache_whose_blocks_expire(local: Local) -> None:
    for _ in range(2):  # the Job may run again
        done = local.make_bucket()
        assert done.returncode == 0, done.stdout + done.stderr
    client = local.client()
    place = {"Bucket": bucket(), "Key": "training/v1/a/b/000000"}
    client.put_object(**place, Body=b"block", IfNoneMatch="*")
    assert client.get_object(**place)["Body"].read() == b"block"
    with pytest.raises(ClientError, match="NoSuchKey"):
        client.get_object(**{**place, "Key": "training/v1/a/b/000001"})
    listed = client.list_objects_v2(Bucket=bucket(), Prefix="training/v1/")["Contents"]
    assert [each["Key"] for each in listed] == [place["Key"]]
    client.delete_object(**place)
    # Its keys are for the one bucket.
    with pytest.raises(ClientError, match="AccessDenied"):
        client.create_bucket(Bucket="other")
    lifetimes = [volume["Ttl"] for volume in volumes_of(local)]
    assert lifetimes
    # A fortnight, as SeaweedFS writes 14 days: units are minutes, hours, days, weeks.
    assert all(lifetime == {"Count": 2, "Unit": 4} for lifetime in lifetimes)


def volumes_of(local: Local) -> list[Object]:
    """The master's volumes of the bucket."""
    url = f"http://{HOST}:{local.ports['master']}/vol/status"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        [rack] = json.load(answer)["Volumes"]["DataCenters"]["DefaultDataCenter"].values()
    return [
        volume for server in rack.values() for volume in server if volume["Collection"] == bucket()
    ]
