"""Kubernetes' programs, its e2e suite and the sidecars, compiled from Go modules.

Each program is built in a module of its own, whose go.mod is the program's: it then has the
versions that its authors tested. In Kubernetes' own the paths of its staging folder stand for the
modules k8s.io/X, whose version is Kubernetes' with 0 for the 1. Go checks all of them against its
database of sums.
"""

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

VERSIONS = tomllib.loads(Path(__file__).with_name("versions.toml").read_text())
KUBERNETES = "k8s.io/kubernetes"
COMMANDS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")


def kubernetes(cache: Path, minor: str) -> Path:
    """The folder with Kubernetes' programs, the e2e suite, agnhost and ginkgo of this version."""
    version = VERSIONS["kubernetes"][minor]
    place = cache / version
    commands = [f"{KUBERNETES}/cmd/{name}" for name in COMMANDS]
    commands += [f"{KUBERNETES}/test/images/agnhost", "github.com/onsi/ginkgo/v2/ginkgo"]
    suite = f"{KUBERNETES}/test/e2e"
    if not (place / "bin/e2e.test").exists():
        _module(place / "src", KUBERNETES, version)
        major, number = version.removeprefix("v").split(".")[:2]
        flags = ["-s", "-w"]
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
            flags += [f"-X={package}.gitVersion={version}"]
            flags += [f"-X={package}.gitMajor={major}", f"-X={package}.gitMinor={number}"]
        linked = f"-ldflags={' '.join(flags)}"
        _go(place / "src", "build", linked, "-o", f"{place}/bin/", *commands)
        _go(place / "src", "test", "-c", "-vet=off", linked, "-o", f"{place}/e2e.test", suite)
        (place / "e2e.test").rename(place / "bin/e2e.test")
    return place / "bin"


def others(cache: Path) -> Path:
    """The folder with the sidecars and csi-sanity."""
    for package, version in VERSIONS["programs"].items():
        name = package.rpartition("/")[2]
        place = cache / f"{name}-{version}"
        if not (place / name).exists():
            _module(place, package.partition("/cmd/")[0], version)
            _go(place, "build", "-ldflags=-s -w", "-o", str(place / name), package)
        (cache / "bin").mkdir(exist_ok=True)
        shutil.copy(place / name, cache / "bin" / name)
    return cache / "bin"


def _module(place: Path, module: str, version: str) -> None:
    """Make a module that depends on `module` and is built as that is: with its go.mod."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    found = json.loads(_go(place, "mod", "download", "-json", f"{module}@{version}"))
    shutil.copyfile(found["GoMod"], place / "go.mod")
    edits = ["-module=fusefs.test/programs", f"-require={module}@{version}"]
    for replaced in json.loads(_go(place, "mod", "edit", "-json")).get("Replace") or ():
        name = replaced["Old"]["Path"]
        if replaced["New"]["Path"].startswith("./"):
            of_staging = f"{name}@v0.{version.partition('.')[2]}"
            edits.append(f"-replace={name}={VERSIONS['instead'].get(of_staging, of_staging)}")
    _go(place, "mod", "edit", *edits)


def _go(place: Path, *arguments: str) -> str:
    """Run Go in a module's folder, at the lowest priority; returns what it printed.

    Raises:
        subprocess.CalledProcessError: it failed; Go's own words are on standard error.
    """
    go = shutil.which("go") or "/usr/local/go/bin/go"
    flags = os.environ.get("GOFLAGS", "") + " -buildvcs=false"
    if arguments[0] in ("build", "test"):
        flags += " -mod=mod"
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": flags.strip(), "GOWORK": "off"}
    command = ["nice", "-n", "19", go, *arguments]
    done = subprocess.run(command, cwd=place, env=environment, stdout=subprocess.PIPE, check=True)
    return done.stdout.decode()
