"""The examples for a cluster: valid, complete, and in words that the driver understands.

Operators' own kinds are checked against the fields that their Go types have; the pod templates
in them, and all else, against Kubernetes' schemas.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from csi.server import DRIVER_NAME
from csi.volume import location, stores
from csi.volume.options import check_attributes
from tests.support.packaging.kinds import check_kind
from tests.support.packaging.manifests import (
    MANIFESTS,
    PROJECT,
    VERSIONS,
    Object,
    check,
    containers,
    every,
    name_of,
    pod_templates,
    read,
    render,
)

DIRECTORY = PROJECT / "examples/kubernetes"
EXAMPLES = sorted(DIRECTORY.glob("*.yaml"))

each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def documents(path: Path) -> list[Object]:
    return read(path.read_text())


def pods(path: Path) -> list[Object]:
    """Bare pods, and the templates in all that makes some."""
    return list(pod_templates(documents(path)))


@each_example
def test_an_example_is_valid(path: Path) -> None:
    for document in documents(path):
        for version in VERSIONS:
            if not check_kind(document):
                check(document, version)
    for pod in pods(path):
        template = {"spec": pod["spec"], "metadata": pod.get("metadata", {})}
        wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        check(wrapped, VERSIONS[-1])


@each_example
def test_an_example_begins_with_what_it_is_for(path: Path) -> None:
    comment = re.match(r"(# .+\n){2,}", path.read_text())
    assert comment, "two lines at least"


@each_example
def test_every_volume_that_is_mounted_is_there(path: Path) -> None:
    for pod in pods(path):
        there = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        used = {mount["name"] for each in containers(pod) for mount in each.get("volumeMounts", [])}
        assert used == there


@each_example
def test_claims_are_in_the_example_and_their_classes_are_shipped(path: Path) -> None:
    claims = {name_of(claim): claim for claim in every(documents(path), "PersistentVolumeClaim")}
    wanted = {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods(path)
        for volume in pod["spec"].get("volumes", [])
        if "persistentVolumeClaim" in volume
    }
    assert wanted == claims.keys()
    shipped = {name_of(each) for each in every(render(MANIFESTS), "StorageClass")}
    existing = {name_of(volume) for volume in every(documents(path), "PersistentVolume")}
    for claim in claims.values():
        spec = claim["spec"]
        if spec["storageClassName"]:
            assert spec["storageClassName"] in shipped
        else:
            assert spec["volumeName"] in existing


@each_example
def test_a_static_volume_is_bound_to_its_claim_alone_and_kept(path: Path) -> None:
    claims = {name_of(claim): claim for claim in every(documents(path), "PersistentVolumeClaim")}
    for volume in every(documents(path), "PersistentVolume"):
        spec = volume["spec"]
        claim = claims[spec["claimRef"]["name"]]
        assert claim["spec"]["volumeName"] == name_of(volume)
        assert claim["spec"]["accessModes"] == spec["accessModes"]
        assert claim["metadata"]["namespace"] == spec["claimRef"]["namespace"]
        assert spec["persistentVolumeReclaimPolicy"] == "Retain"


@each_example
def test_the_driver_understands_what_a_volume_asks_for(path: Path) -> None:
    for volume in every(documents(path), "PersistentVolume"):
        source, flags = volume["spec"]["csi"], volume["spec"].get("mountOptions", [])
        understand(source, flags, is_inline=False)
    for pod in pods(path):
        for volume in pod["spec"].get("volumes", []):
            if "csi" in volume:
                understand(volume["csi"], [], is_inline=True)
    for each in every(documents(path), "StorageClass"):
        parameters = dict(each["parameters"])
        assert parameters.pop("onDelete") == "retain"
        source = {"driver": each["provisioner"], "volumeAttributes": parameters}
        understand(source, each.get("mountOptions", []), is_inline=False)


def understand(source: Object, flags: list[str], *, is_inline: bool) -> None:
    assert source["driver"] == DRIVER_NAME
    attributes = source["volumeAttributes"]
    location.location_of(attributes, stores.read_stores(None))
    own = {name: text for name, text in attributes.items() if name not in location.LOCATION_KEYS}
    check_attributes(own, flags, is_inline=is_inline)


@each_example
def test_whoever_is_not_root_has_the_group_that_may_write(path: Path) -> None:
    for pod in pods(path):
        context = pod["spec"].get("securityContext", {})
        # Memory belongs to whoever mounts it, and a ConfigMap cannot be written.
        own = {
            each["name"]
            for each in pod["spec"].get("volumes", [])
            if "emptyDir" in each or "configMap" in each
        }
        writes = any(
            not mount.get("readOnly") and mount["name"] not in own
            for each in containers(pod)
            for mount in each.get("volumeMounts", [])
        )
        if context.get("runAsNonRoot") and writes:
            assert context["fsGroup"] == context["runAsGroup"]


@each_example
def test_images_have_a_version(path: Path) -> None:
    for pod in pods(path):
        for each in containers(pod):
            tag = each["image"].rpartition("/")[2].partition(":")[2]
            assert re.search(r"\d", tag), each["image"]


@each_example
def test_variables_of_paths_are_defined(path: Path) -> None:
    for pod in pods(path):
        for each in containers(pod):
            known = {variable["name"] for variable in each.get("env", [])}
            paths = [mount.get("subPathExpr", "") for mount in each.get("volumeMounts", [])]
            used = re.findall(r"\$\((\w+)\)", " ".join([*paths, *each.get("command", [])]))
            assert set(used) <= known


@each_example
def test_a_headless_service_selects_the_pods_that_are_named_by_it(path: Path) -> None:
    found = documents(path)
    for service in every(found, "Service"):
        [selector] = service["spec"]["selector"].items()
        if selector[0] == "job-name":  # a label that the job's controller sets
            assert selector[1] in {name_of(job) for job in every(found, "Job")}
        else:
            assert any(selector in pod["metadata"]["labels"].items() for pod in pods(path))


def test_every_example_is_in_the_list() -> None:
    text = (DIRECTORY / "README.md").read_text()
    listed = set(re.findall(r"\]\(([\w.-]+)\)", text))
    here = {path.name for path in DIRECTORY.iterdir() if path.suffix in (".yaml", ".py")}
    assert here <= listed
    assert all((DIRECTORY / name).exists() for name in listed)


def test_the_rules_for_gpus_are_those_of_the_monitoring() -> None:
    [rules] = read((PROJECT / "monitoring/prometheus/rules.yaml").read_text())
    ours = {
        rule["record"]: rule
        for group in rules["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    [example] = every(documents(DIRECTORY / "dcgm.yaml"), "PrometheusRule")
    for rule in example["spec"]["groups"][0]["rules"]:
        assert rule == ours[rule["record"]]
    [monitor] = every(documents(DIRECTORY / "dcgm.yaml"), "PodMonitor")
    [own] = read((MANIFESTS / "components/pod-monitor/podmonitor.yaml").read_text())
    assert monitor["spec"]["podMetricsEndpoints"] == own["spec"]["podMetricsEndpoints"]


def test_a_job_has_as_many_pods_as_its_data_set_has_parts() -> None:
    """What the driver does for each of them: tests/csi/node/test_warming.py."""
    found = documents(DIRECTORY / "warm-shards.yaml")
    [job], [volume] = every(found, "Job"), every(found, "PersistentVolume")
    attributes = dict(volume["spec"]["csi"]["volumeAttributes"])
    assert job["spec"]["completionMode"] == "Indexed"
    assert attributes["warmShards"] == str(job["spec"]["completions"])
    assert attributes["warmBeforePublish"] == "true"


def test_the_airflow_tasks_mount_the_claim_of_the_dynamic_example(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator = mock.MagicMock()
    models = mock.MagicMock()
    models.V1PersistentVolumeClaimVolumeSource = recorded
    models.V1Volume = recorded
    models.V1VolumeMount = recorded
    for name, contents in {
        "airflow": {"DAG": mock.MagicMock()},
        "airflow.providers.cncf.kubernetes.operators.pod": {"KubernetesPodOperator": operator},
        "kubernetes.client": {"models": models},
    }.items():
        put_module(monkeypatch, name, contents)
    runpy.run_path(str(DIRECTORY / "airflow_dag.py"))
    [claim] = every(documents(DIRECTORY / "dynamic-claim.yaml"), "PersistentVolumeClaim")
    assert operator.call_count == 2
    for call in operator.call_args_list:
        assert call.kwargs["namespace"] == claim["metadata"]["namespace"]
        [volume] = call.kwargs["volumes"]
        [mount] = call.kwargs["volume_mounts"]
        assert volume["persistent_volume_claim"] == {"claim_name": name_of(claim)}
        assert mount["name"] == volume["name"]


def recorded(**arguments: Any) -> dict[str, Any]:
    return arguments


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, contents: dict[str, Any]) -> None:
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        part = ".".join(parts[:count])
        if part not in sys.modules:
            monkeypatch.setitem(sys.modules, part, ModuleType(part))
    for attribute, value in contents.items():
        monkeypatch.setattr(sys.modules[name], attribute, value, raising=False)


@pytest.mark.parametrize("name", ["tf_train.py", "streaming_train.py"])
def test_a_script_for_another_library_compiles(name: str) -> None:
    compile((DIRECTORY / name).read_text(), name, "exec")


def test_the_training_script_trains_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("torch") is None:
        compile((DIRECTORY / "train.py").read_text(), "train.py", "exec")
        pytest.skip("torch is not installed; the script was only compiled")
    import torch

    data = tmp_path / "data"
    data.mkdir()
    x = torch.randn(64, 32)
    torch.save({"x": x, "y": x[:, :10].argmax(1)}, data / "0.pt")
    monkeypatch.setenv("DATA_DIR", str(data))
    monkeypatch.setenv("CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    for epochs in ("1", "2"):
        monkeypatch.setenv("EPOCHS", epochs)
        runpy.run_path(str(DIRECTORY / "train.py"), run_name="__main__")
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"epoch-00000.pt", "epoch-00001.pt"}
