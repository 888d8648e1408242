"""The examples for a cluster: valid, complete, and in words that the driver understands.

The pod templates in operators' own kinds, and all else, are checked against Kubernetes' schemas.
"""

import importlib.util
import re
import runpy
from pathlib import Path

import pytest

from csi.server import DRIVER_NAME
from csi.volume import location, stores
from csi.volume.options import read_options
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
            check(document, version)
    for pod in pods(path):
        template = {"spec": pod["spec"], "metadata": pod.get("metadata", {})}
        wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        check(wrapped, VERSIONS[-1])


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
    read_options(own, flags, is_inline=is_inline)


def test_every_example_is_in_the_list() -> None:
    text = (DIRECTORY / "README.md").read_text()
    listed = set(re.findall(r"\]\(([\w.-]+)\)", text))
    here = {path.name for path in DIRECTORY.iterdir() if path.suffix in (".yaml", ".py")}
    assert here <= listed
    assert all((DIRECTORY / name).exists() for name in listed)


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
