"""What is in the image and on it: for both architectures, listed, labelled and small."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import hcl2

from fusefs import __version__
from tests.support.packaging.image import PROJECT, stages
from tests.support.packaging.manifests import MANIFESTS, container, read, render, template

MIB = 1 << 20
PINNED = PROJECT / "image/requirements.txt"
# Debian's Python and C library in the image: bookworm's.
PYTHON, GLIBC = (3, 11), (2, 36)
ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}


def pinned() -> dict[str, tuple[str, set[str]]]:
    """Package to version and hashes."""
    found = {}
    for line in PINNED.read_text().replace("\\\n", "").splitlines():
        name, _, rest = line.partition("==")
        found[name] = (rest.split()[0], set(re.findall(r"--hash=sha256:(\w+)", line)))
    return found


# --- both architectures -----------------------------------------------------------


def test_the_bake_file_builds_both_with_attestations() -> None:
    found: Any = hcl2.loads((PROJECT / "image/docker-bake.hcl").read_text())

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {plain(name): plain(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return value.strip('"') if isinstance(value, str) else value

    found = plain(found)
    targets = {name: each[name] for each in found["target"] for name in each}
    variables = {name: each[name] for each in found["variable"] for name in each}
    image = targets["image"]
    assert image["platforms"] == [f"linux/{name}" for name in ARCHITECTURES]
    assert {each.split(",")[0] for each in image["attest"]} == {"type=provenance", "type=sbom"}
    assert (PROJECT / image["context"] / image["dockerfile"]).samefile(PROJECT / "Dockerfile")
    given = {name for name in image["args"] if name != "SOURCE_DATE_EPOCH"}
    assert given == {each.partition("=")[0] for each in last_stage().texts("ARG")}
    assert image["args"].keys() <= variables.keys()
    assert targets["local"]["inherits"] == ["image"]
    # Bake merges inherited attestations by their type.
    assert targets["local"]["attest"] == [
        f"{each.split(',')[0]},disabled=true" for each in image["attest"]
    ]
    assert found["group"][0]["default"]["targets"] == ["image"]


def last_stage() -> Any:
    return stages((PROJECT / "Dockerfile").read_text())[-1]


# --- labels and versions ----------------------------------------------------------


def test_labels_say_what_was_built_and_no_time() -> None:
    [text] = last_stage().texts("LABEL")
    labels = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', text))
    assert labels.keys() >= {"title", "description", "version", "revision", "source", "licenses"}
    assert "created" not in labels
    arguments = {each.partition("=")[0] for each in last_stage().texts("ARG")}
    used = {value.removeprefix("$") for value in labels.values() if value.startswith("$")}
    assert used == arguments == {"VERSION", "REVISION", "SOURCE"}
    [base] = {
        each.base for each in stages((PROJECT / "Dockerfile").read_text()) if "@" in each.base
    }
    assert labels["base.name"] == f"docker.io/library/{base.partition('@')[0]}"


def test_everything_names_the_same_version() -> None:
    [argument] = (each for each in last_stage().texts("ARG") if each.startswith("VERSION"))
    bake = re.search(
        r'"VERSION" \{\s+default = "(.*)"', (PROJECT / "image/docker-bake.hcl").read_text()
    )
    [values] = read((PROJECT / "charts/fusefs-csi/values.yaml").read_text())
    [chart] = read((PROJECT / "charts/fusefs-csi/Chart.yaml").read_text())
    image = container(template(render(MANIFESTS), "fusefs-csi-node"), "driver")["image"]
    assert bake is not None
    for other in (
        argument.partition("=")[2],
        bake[1],
        values["image"]["tag"],
        str(chart["appVersion"]),
        image.rpartition(":")[2],
    ):
        assert other == __version__


# --- the list of packages, and the size -------------------------------------------


def test_the_sbom_names_every_pinned_package(tmp_path: Path) -> None:
    path = tmp_path / "sbom.json"
    # Not the virtual environment, which this test runs from.
    command = ["make", "--old-file=.venv/.set-up", "sbom", f"SBOM={path}"]
    subprocess.run(command, cwd=PROJECT, capture_output=True, check=True)
    listed = json.loads(path.read_text())
    assert (listed["bomFormat"], listed["metadata"]["component"]["name"]) == (
        "CycloneDX",
        "fusefs-s3",
    )
    assert "timestamp" not in listed["metadata"]
    versions = {component["name"]: component["version"] for component in listed["components"]}
    assert versions == {name: version for name, (version, _) in pinned().items()}
