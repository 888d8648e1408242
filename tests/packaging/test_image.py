"""The image: pinned, without a compiler, and with a package that runs.

The steps need a base image and minutes, so CI builds only the package, as the Dockerfile does. With
IMAGE_ROOT=1 all steps are run in a fresh Debian root (root, mmdebstrap and a package mirror are
needed; it stands for the base image, which no test here can fetch).
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import hcl2
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fusefs import __version__
from tests.support.packaging.image import (
    PROJECT,
    Stage,
    build,
    copied,
    copy_sources,
    run_in,
    size_of,
    stages,
)
from tests.support.packaging.manifests import MANIFESTS, container, read, render, template

MIB = 1 << 20


@pytest.fixture
def found() -> list[Stage]:
    return stages((PROJECT / "Dockerfile").read_text())


def pins(name: str) -> dict[str, tuple[str, int]]:
    """Package to version and number of hashes."""
    text = (PROJECT / "image" / name).read_text().replace("\\\n", "")
    return {
        line.split("==")[0]: (line.split("==")[1].split()[0], line.count("--hash=sha256:"))
        for line in text.splitlines()
        if "==" in line
    }


def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, PROJECT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_base_is_pinned_by_its_digest(found: list[Stage]) -> None:
    names = {stage.name for stage in found}
    outside = [stage.base for stage in found if stage.base not in names]
    assert len(outside) == 1
    assert re.fullmatch(r"debian:[\w-]+@sha256:[0-9a-f]{64}", outside[0])


def test_what_compiles_is_not_in_the_image(found: list[Stage]) -> None:
    by_name = {stage.name: stage for stage in found}
    image = found[-1]
    installed = " ".join([*image.texts("RUN"), *by_name[image.base].texts("RUN")])
    assert not re.search(r"\b(gcc|[\w-]+-dev|pip|venv|make)\b", installed)
    assert image.texts("COPY") == ["--from=build /opt/fusefs /opt/fusefs"]


def test_what_the_program_needs_is_pinned_with_hashes() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["csi"],
    ]
    pinned = pins("requirements.txt")
    for requirement in map(Requirement, wanted):
        version, _ = pinned[requirement.name]
        assert requirement.specifier.contains(version), requirement
    assert all(hashes for _, hashes in pinned.values())


def test_what_builds_is_pinned_and_of_the_same_grpc() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    builds, runs = pins("build.txt"), pins("requirements.txt")
    for requirement in map(Requirement, project["build-system"]["requires"]):
        version, hashes = builds[requirement.name]
        assert requirement.specifier.contains(version), requirement
        assert hashes
    assert builds["protobuf"][0] == runs["protobuf"][0]
    assert builds["grpcio-tools"][0] == runs["grpcio"][0]


def test_the_context_has_what_is_copied_and_nothing_else(found: list[Stage]) -> None:
    lines = (PROJECT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    used = {
        source.split("/")[0]
        for stage in found
        for sources, _ in copied(stage)
        for source in sources
    }
    assert kept == used


def test_the_image_runs_as_an_ordinary_user_under_an_init(found: list[Stage]) -> None:
    image = found[-1]
    [user] = image.texts("USER")
    assert int(user.partition(":")[0]) > 0
    [entry] = image.texts("ENTRYPOINT")
    assert ast.literal_eval(entry) == ["/usr/bin/tini", "--", "fusefs-csi"]


def test_the_package_that_the_image_installs_runs(found: list[Stage], tmp_path: Path) -> None:
    [stage] = (stage for stage in found if stage.name == "build")
    sources, target = tmp_path / "src", tmp_path / "installed"
    sources.mkdir()
    copy_sources(stage, sources)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, sources],
        env={**os.environ, "CFLAGS": "-O0"},  # in a third of the time
        check=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target)
    # -S: nothing of this checkout, which is installed here, too; only the dependencies.
    path = [str(target), sysconfig.get_path("purelib")]
    code = f"import sys; sys.path[:0] = {path}; from fusefs.csi_command import main; main()"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for command in ("node", "controller", "daemons"):
        assert command in done.stdout
    assert {path.name.partition("-")[0] for path in target.iterdir()} == {"fusefs", "fusefs_s3"}


@pytest.mark.skipif("IMAGE_ROOT" not in os.environ, reason="takes minutes: IMAGE_ROOT=1")
def test_all_steps_run_in_a_fresh_root(found: list[Stage], tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        pytest.skip("needs root and mmdebstrap")
    root = build(found, tmp_path)
    try:
        user = found[-1].texts("USER")[0]
        output = run_in(root, "fusefs-csi --version && fusefs --version", user=user)
        assert output.startswith("fusefs-csi ")
        run_in(root, "fusefs-csi node --help && fusefs-csi controller --help", user=user)
        run_in(root, "/opt/fusefs/bin/python -c 'import pyfuse3'", user=user)
        assert run_in(root, "command -v gcc cc pip || echo none", user=user).strip() == "none"
        own, whole = size_of(root / "opt/fusefs"), size_of(root) - not_in_slim(root)
        print(f"/opt/fusefs {own / MIB:.0f} MiB, all {whole / MIB:.0f} MiB")
        listed = json.loads((root / "opt/fusefs/share/sbom.json").read_text())["components"]
        versions = {canonicalize_name(each["name"]): each["version"] for each in listed}
        pinned = {name: version for name, (version, _) in pins("requirements.txt").items()}
        assert versions.items() >= pinned.items()
        assert "fusefs-s3" in versions
        assert own < 120 * MIB
        assert whole < 300 * MIB
    finally:
        shutil.rmtree(tmp_path)


def not_in_slim(root: Path) -> int:
    """The bytes of what mmdebstrap keeps and Debian's slim images leave out."""
    left_out = ("share/doc", "share/info", "share/locale", "share/man")
    found = [root / "usr" / name for name in left_out]
    found += [root / "var/lib/apt/lists", root / "var/cache/apt"]
    return sum(size_of(path) for path in found)


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
    assert image["platforms"] == ["linux/amd64", "linux/arm64"]
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
    assert versions == {name: version for name, (version, _) in pins("requirements.txt").items()}
