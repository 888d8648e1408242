"""docs/start/kubernetes.md: what it has typed works, as far as one machine can show it.

Its store starts with the manifest's own arguments, its bucket is made by the command that is
written there, its claim is provisioned with the parameters of the class that its kustomization
renders, and its pods' commands run over the mount. What takes a cluster, a cloud or another
company's store is checked by reading it.
"""

import argparse
import json
import os
import re
import shlex
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from csi import main
from csi.generated import csi_pb2
from csi.volume import location, stores
from fusefs.diagnosis import bucket
from tests.support.csi.calls import Driver, mount_capability
from tests.support.csi.node import running_node
from tests.support.packaging.documents import commands, shell_blocks
from tests.support.packaging.manifests import (
    PROJECT,
    VERSIONS,
    chart,
    check,
    check_classes,
    container,
    containers,
    every,
    find,
    lets_out,
    name_of,
    own_parameters,
    pod_templates,
    read,
    render,
    stores_file,
    template,
)
from tests.support.servers.s3_server import free_ports, is_free, spawn
from tests.support.sharing import PATIENCE_S

DOCUMENT = PROJECT / "docs/start/kubernetes.md"
FILES = PROJECT / "examples/kubernetes/quickstart"
KUSTOMIZATIONS = sorted(path.parent for path in FILES.rglob("kustomization.yaml"))
# What the reader's own commands find out.
FOUND = {"ACCOUNT": "123456789012", "OIDC": "oidc.eks.eu-central-1.amazonaws.com/id/EXAMPLE"}
CREATED = "volume-0b5c6a3e"

typed = [command for block in shell_blocks(DOCUMENT) for command in commands(block)]


def exported() -> dict[str, str]:
    """The variables of the section on EKS, with examples of what commands find."""
    found: dict[str, str] = dict(FOUND)
    for command in typed:
        if command[0] == "export":
            for name, _, value in (word.partition("=") for word in command[1:]):
                found.setdefault(name, string.Template(value).safe_substitute(found))
    return found


def substituted(path: Path, **more: str) -> str:
    """What `envsubst` makes of the file; a variable that is not exported is a KeyError."""
    text = path.read_text()
    values = {**exported(), **more}
    return re.sub(r"\$([A-Z_]+)", lambda name: values[name[1]], text)


CHARTS = {
    "eks": [FILES / "eks/values.yaml"],
    "minio": [FILES / "on-premises/values.yaml", FILES / "on-premises/minio.yaml"],
    "ceph": [FILES / "on-premises/values.yaml", FILES / "on-premises/ceph.yaml"],
}


def values_of(*files: Path) -> dict[str, Any]:
    """The values that the reader gives to the chart, by these files."""
    values: dict[str, Any] = {"certificates": {"ca.pem": "-----BEGIN CERTIFICATE-----\n"}}
    for path in files:
        [own] = read(substituted(path))
        values |= own
    return values


@pytest.mark.parametrize("directory", KUSTOMIZATIONS, ids=lambda path: path.name)
def test_every_kustomization_is_valid(directory: Path) -> None:
    parser: argparse.ArgumentParser = main.make_parser()
    for document in render(directory):
        for version in VERSIONS:
            check(document, version)
        for pod in pod_templates(document):
            for each in containers(pod):
                assert re.search(r":.*\d", each["image"].rpartition("/")[2])
                if "fusefs-csi:" in each["image"]:
                    parser.parse_args(each["args"])


@pytest.mark.parametrize("name", CHARTS)
def test_the_charts_values_are_taken_and_understood(name: str, tmp_path: Path) -> None:
    documents = chart(**values_of(*CHARTS[name]))
    for document in documents:
        for version in VERSIONS:
            check(document, version)
    check_classes(documents, stores_file(documents, tmp_path))


def test_secrets_are_those_that_the_classes_name() -> None:
    made = set()
    for command in typed:
        if command[:1] == ["kubectl"] and "generic" in command:
            made.add(command[command.index("generic") + 1])
            fields = {word.split("=")[1] for word in command if word.startswith("--from-literal")}
            assert fields == {"access_key_id", "secret_access_key"}
    for documents in (render(FILES / "driver"), chart(**values_of(*CHARTS["minio"]))):
        for each in every(documents, "StorageClass"):
            for name, value in each["parameters"].items():
                assert not name.endswith("secret-name") or value in made


def test_a_roles_trust_policy_names_an_account_that_is_there() -> None:
    subjects = {
        word.partition("=")[2].removeprefix("(")
        for block in shell_blocks(DOCUMENT)
        for word in re.findall(r"SERVICE_ACCOUNT=\S+", block)
    }
    documents = [*chart(**values_of(*CHARTS["eks"])), *render(FILES / "eks/training")]
    accounts = {
        f"{each['metadata']['namespace']}:{name_of(each)}"
        for each in every(documents, "ServiceAccount")
    }
    assert len(subjects) == 2
    assert subjects <= accounts
    [job] = pod_templates(find(documents, "Job"))
    assert f"default:{job['spec']['serviceAccountName']}" in subjects
    for subject in subjects:
        policy = json.loads(substituted(FILES / "eks/trust.json", SERVICE_ACCOUNT=subject))
        [condition] = (each["Condition"]["StringEquals"] for each in policy["Statement"])
        assert condition[f"{FOUND['OIDC']}:sub"] == f"system:serviceaccount:{subject}"
        [request] = find(documents, "CSIDriver")["spec"]["tokenRequests"]
        assert condition[f"{FOUND['OIDC']}:aud"] == request["audience"]


def test_the_pods_role_may_what_a_volume_does() -> None:
    policy = json.loads(substituted(FILES / "eks/training-policy.json"))
    [storage_class] = every(chart(**values_of(*CHARTS["eks"])), "StorageClass")
    names = {"pvc.namespace": "default", "pvc.name": "training"}
    prefix = location.fill_in(storage_class["parameters"]["prefix"], names)
    name = storage_class["parameters"]["bucket"]
    allowed = {
        action
        for each in policy["Statement"]
        for action in ([each["Action"]] if isinstance(each["Action"], str) else each["Action"])
        if f"arn:aws:s3:::{name}/{prefix}".startswith(each["Resource"].rstrip("*"))
        or each["Resource"].endswith(name)
    }
    page = (PROJECT / "docs/guides/volume-identities.md").read_text()
    [rows] = re.findall(r"^\| a reader \|.*?(?=^\| a writer that)", page, re.DOTALL | re.MULTILINE)
    assert allowed == set(re.findall(r"s3:\w+", rows))


def test_policies_name_the_permissions_of_every_request() -> None:
    """The names that boto3 has for requests, and what of them is a permission of AWS."""
    permissions = {
        "abort_multipart_upload": "s3:AbortMultipartUpload",
        "complete_multipart_upload": "s3:PutObject",
        "copy_object": "s3:PutObject",
        "create_multipart_upload": "s3:PutObject",
        "delete_object": "s3:DeleteObject",
        "delete_objects": "s3:DeleteObject",
        "get_object": "s3:GetObject",
        "head_object": "s3:GetObject",
        "list_multipart_uploads": "s3:ListBucketMultipartUploads",
        "list_objects_v2": "s3:ListBucket",
        "list_parts": "s3:ListMultipartUploadParts",
        "put_object": "s3:PutObject",
        "upload_part": "s3:PutObject",
        "upload_part_copy": "s3:PutObject",
    }
    # Tags are of other clients, and docs/guides/volume-identities.md names their permissions.
    others = {"get_object_tagging", "close"}
    sources = (PROJECT / "fusefs").rglob("*.py")
    sent = {name for path in sources for name in re.findall(r"\.s3\.(\w+)\(", path.read_text())}
    assert sent - others <= permissions.keys()
    needed = set(permissions.values())
    for policy in ("on-premises/policy.json", "eks/training-policy.json"):
        assert set(re.findall(r"s3:[A-Z]\w+", (FILES / policy).read_text())) == needed
    # Without these an interrupted upload begins anew: doctor does not ask for them.
    needed -= {"s3:ListBucketMultipartUploads", "s3:ListMultipartUploadParts"}
    assert set(re.findall(r"s3:[A-Z]\w+", " ".join(bucket._ACTIONS.values()))) == needed


@pytest.mark.parametrize("name", ["minio", "ceph"])
def test_the_policy_lets_out_the_store(name: str, tmp_path: Path) -> None:
    documents = chart(**values_of(*CHARTS[name]))
    known = stores.read_stores(stores_file(documents, tmp_path)).choose("on-premises")
    assert known.endpoint_url is not None
    assert lets_out(find(documents, "NetworkPolicy"), known.endpoint_url)
    assert known.endpoint_url in DOCUMENT.read_text()
    assert find(documents, "ConfigMap", "fusefs-csi-stores")["data"]["ca.pem"]


def test_a_command_in_a_pod_gets_a_secret_that_is_not_among_its_words(tmp_path: Path) -> None:
    """The audit log of the API server has these, and so has the node's list of processes."""
    inside = [
        command[command.index("--") + 1 :]
        for command in typed
        if command[0] == "kubectl" and "exec" in command
    ]
    assert not any("$FUSEFS_SECRET" in word for words in inside for word in words)
    [words] = (words for words in inside if "doctor" in words)
    # Shows what it was called with.
    (tmp_path / "fusefs").write_text('#!/bin/sh\necho "$@"\nenv\n')
    (tmp_path / "fusefs").chmod(0o755)
    done = subprocess.run(
        words,
        input="hidden",
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    called, *variables = done.stdout.splitlines()
    assert called.startswith("doctor s3://training --endpoint-url https://")
    assert {"AWS_ACCESS_KEY_ID=fusefs-key", "AWS_SECRET_ACCESS_KEY=hidden"} <= {*variables}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """The store's pod without its container; the ports of master, volume server, filer and S3."""
    directory = tmp_path_factory.mktemp("store")
    pod = template(render(FILES / "store"), "seaweedfs")
    weed = container(pod, "seaweedfs")
    master, volume, filer, s3 = ports = free_ports()
    given = " ".join(weed["args"])
    places = {"/tmp": directory, "/data": directory, "/etc/seaweedfs": FILES / "store"}
    for path, place in places.items():
        given = given.replace(f"={path}", f"={place}")
    given = given.replace("-s3.port=8333", f"-s3.port={s3}")
    given += f" -master.port={master} -volume.port={volume} -filer.port={filer}"
    environment = {each["name"]: each["value"] for each in weed["env"]}
    program = Path(sys.prefix) / "bin" / weed["command"][0]
    process = spawn([str(program), *given.split()], directory / "weed.out", **environment)
    try:
        # As the pod's readiness probe.
        deadline = time.monotonic() + PATIENCE_S
        while is_free(s3):
            assert process.poll() is None, (directory / "weed.out").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield ports
    finally:
        process.kill()
        process.wait()
        for port in ports:
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


def in_store(ports: list[int], number: int) -> str:
    """Run a command that is typed for the store's pod; returns what it printed."""
    inside = [
        command[command.index("--") + 1 :]
        for command in typed
        if command[0] == "kubectl" and "exec" in command and "deployment/seaweedfs" in command
    ][number]
    text = shlex.join(inside).replace("weed shell", f"weed shell -master=127.0.0.1:{ports[0]}")
    path = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", text],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": path},
        timeout=5 * PATIENCE_S,
    )
    return done.stdout + done.stderr


def test_the_quick_start_lists_trains_and_goes_on(store: list[int], tmp_path: Path) -> None:
    in_store(store, 0)
    documents = render(FILES / "driver")
    url = f"http://127.0.0.1:{store[-1]}"
    [claim] = every(render(FILES / "training"), "PersistentVolumeClaim")
    parameters = own_parameters(find(documents, "StorageClass", claim["spec"]["storageClassName"]))
    [identity] = json.loads((FILES / "store/s3.json").read_text())["identities"]
    [keys] = identity["credentials"]
    secrets = {"access_key_id": keys["accessKey"], "secret_access_key": keys["secretKey"]}
    assert all(f"{name}={value}" in DOCUMENT.read_text() for name, value in secrets.items())
    with running_node(serves="all", **{parameters["store"]: url}) as node:
        driver = Driver(node.socket)
        created = driver.controller.CreateVolume(
            csi_pb2.CreateVolumeRequest(
                name=CREATED,
                volume_capabilities=[mount_capability()],
                parameters={
                    **parameters,
                    "csi.storage.k8s.io/pvc/name": name_of(claim),
                    "csi.storage.k8s.io/pvc/namespace": claim["metadata"]["namespace"],
                    "csi.storage.k8s.io/pv/name": CREATED,
                },
                secrets=secrets,
            ),
            timeout=PATIENCE_S,
        ).volume
        driver.close()
        target = node.target("training")
        node.publish(created.volume_id, target, secrets=secrets, **dict(created.volume_context))
        first, second = run_job(target), run_job(target)
        node.unpublish(created.volume_id, target)
    assert "part-007.csv" in first
    assert first.splitlines()[-1] in DOCUMENT.read_text()
    assert "going on after epoch-004.json" in second
    assert "epoch-004.json" in in_store(store, 1)


def run_job(target: Path) -> str:
    """The commands of the job's containers, over the volume; what they print."""
    [job] = pod_templates(render(FILES / "training"))
    printed = ""
    for each in containers(job):
        command = shlex.join(each["command"])
        command = command.replace("/training", str(target))
        command = command.replace("/scripts", str(FILES / "training"))
        command = re.sub(r"\bpython\b", sys.executable, command)
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    return printed
