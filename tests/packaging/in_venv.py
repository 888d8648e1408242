"""`make test-wheel`: the wheel in a fresh virtual environment, with what runs and nothing else.

Installs from the package index, for a minute, so the suite leaves it out.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs import __version__
from tests.support.packaging.image import PROJECT
from tests.support.servers.buckets import Bucket
from tests.support.sharing import skip_without_fuse

# What pip says where it gets no answer.
UNREACHABLE = re.compile("NewConnectionError|ConnectTimeout|NameResolutionError|ProxyError")
SOURCES = ("pyproject.toml", "setup.py", "README.md", "proto", "fusefs", "csi")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from nothing but the sources, with the build tools that the project names."""
    directory = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        path = PROJECT / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*_pb2*", "*.so")
            shutil.copytree(path, directory / "source" / name, ignore=ignored)
        else:
            (directory / "source").mkdir(exist_ok=True)
            shutil.copy(path, directory / "source")
    pip(Path(sys.prefix), "wheel", "--no-deps", "--wheel-dir", directory, directory / "source")
    [made] = directory.glob("*.whl")
    return made


@pytest.fixture(scope="module", params=["", "[csi]"], ids=["plain", "csi"])
def extra(request: pytest.FixtureRequest) -> str:
    """What is installed beside the program itself."""
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def venv(extra: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    pip(directory, "install", f"{wheel}{extra}")
    yield directory
    shutil.rmtree(directory)


def pip(environment: Path, *arguments: object) -> str:
    """Run this environment's pip for another one; skip where the index is not reachable."""
    command = [sys.executable, "-m", "pip", "--python", environment / "bin/python"]
    done = subprocess.run(
        [*map(str, command), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip("the package index is not reachable")
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(
    environment: Path, program: str, *arguments: object, fails: bool = False, **variables: str
) -> str:
    """Run one of the environment's programs, with little but its own in sight."""
    done = subprocess.run(
        [environment / "bin" / program, *map(str, arguments)],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) is fails, done.stderr
    return done.stderr if fails else done.stdout


def test_it_brings_what_runs_and_nothing_else(venv: Path, extra: str) -> None:
    installed = {each["name"].lower() for each in json.loads(pip(venv, "list", "--format=json"))}
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    tools = {re.split(r"[\[>=;]", line)[0] for name in ("dev", "bench") for line in extras[name]}
    assert installed & (tools - {"fusefs-s3"}) == set()
    assert "trio" in installed
    assert run(venv, "fusefs", "--version") == f"fusefs {__version__}\n"
    site = next((venv / "lib").glob("python*/site-packages"))
    assert not (site / "csi").exists()  # so common a name is left to others
    if extra:
        assert "node" in run(venv, "fusefs-csi", "--help")
    else:
        assert "pip install './fusefs_s3-….whl[csi]'" in run(
            venv, "fusefs-csi", "--help", fails=True
        )


def test_a_mount_reads_a_file(venv: Path, bucket: Bucket, tmp_path: Path) -> None:
    skip_without_fuse()
    bucket.put("file", b"content" * 100_000)
    (tmp_path / "mnt").mkdir()
    place = ("--endpoint-url", bucket.server.endpoint_url, "--cache-dir", tmp_path / "cache")
    keys = {**bucket.server.environment, "FUSEFS_RUNTIME_DIRECTORY": str(tmp_path / "run")}
    log = ("--log-file", tmp_path / "log")
    run(venv, "fusefs", "mount", f"s3://{bucket.name}", tmp_path / "mnt", *place, *log, **keys)
    try:
        assert (tmp_path / "mnt/file").read_bytes() == b"content" * 100_000
    finally:
        run(venv, "fusefs", "umount", tmp_path / "mnt", **keys)
