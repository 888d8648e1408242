"""The DaemonSets' containers without Kubernetes: their rendered arguments, mounts and rights.

Where there is runc, that makes the containers (see `runc_config`). Else one is a
process in a mount and a PID namespace of its own. Either has a root that cannot
be written and the volumes that the manifest gives it; what the manifest has on
the host is below one directory here. The privileged one keeps its capabilities,
any other has those that are added. What is not imitated: limits, seccomp,
SELinux, networks, users.
"""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.csi.runc_config import PATH, RUNC, runc_config
from tests.support.packaging.manifests import Object, container, host_path

LIMIT_S = 60.0
NODE_NAME = "node-1"
_ISOLATED = ("unshare", "--mount", "--propagation=unchanged", "--pid", "--fork", "--kill-child")


def overlaid_root(directory: Path, mountpoints: list[str]) -> Path:
    """This machine's own root, over which directories may be made; `free` it."""
    root, upper, work = (directory / name for name in ("root", "upper", "work"))
    for each in (root, upper, work):
        each.mkdir()
    options = f"lowerdir=/,upperdir={upper},workdir={work}"
    mounted = subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", root])
    if mounted.returncode != 0:
        pytest.skip("overlayfs cannot be mounted here")
    program = Path(sys.prefix)
    is_hidden = any(program.is_relative_to(path) for path in mountpoints)
    if is_hidden or not (root / program.relative_to("/")).exists():
        subprocess.run(["umount", root], check=True)
        pytest.skip(f"{program} is not to be seen in the containers")
    make_mountpoints(root, mountpoints)
    # For the mounts' users, where Python is root's own.
    (root / "root").chmod(0o711)
    return root


def make_mountpoints(root: Path, mountpoints: list[str]) -> None:
    """What a container runtime does before it makes the root read-only."""
    for path in mountpoints:
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)


def mountpoints_of(*pods: Object) -> list[str]:
    return [
        mount["mountPath"]
        for pod in pods
        for each in pod["spec"]["containers"]
        for mount in each["volumeMounts"]
    ]


@dataclass
class Host:
    """What the containers have of their host, below `directory`; `free` it."""

    directory: Path

    def __post_init__(self) -> None:
        kubelet, run = self.at(Path("/var/lib/kubelet")), self.at(Path("/run"))
        for path in (kubelet, run):
            path.mkdir(parents=True)
        subprocess.run(["mount", "--bind", kubelet, kubelet], check=True)
        subprocess.run(["mount", "--make-shared", kubelet], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", run], check=True)

    def at(self, path: Path) -> Path:
        """Where a path of the host is."""
        return self.directory / path.relative_to("/")


def free(directory: Path) -> None:
    """Unmount all that is mounted below, from the top, and touch none of it."""
    with open("/proc/self/mountinfo") as file:
        mountpoints = [line.split()[4] for line in file]
    for mountpoint in reversed(mountpoints):
        if Path(mountpoint).is_relative_to(directory):
            subprocess.run(["umount", "-l", mountpoint], check=True)


@dataclass
class Container:
    """One container of a pod. Its emptyDirs and ConfigMaps are directories in `own`."""

    root: Path
    host: Host
    own: Path
    pod: Object
    name: str
    program: str
    log: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        command = self._by_runc() if RUNC else self._by_namespaces()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def _command(self) -> list[str]:
        arguments = container(self.pod, self.name)["args"]
        return [
            *self.program.split(),
            *(argument.replace("$(NODE_NAME)", NODE_NAME) for argument in arguments),
        ]

    def _by_runc(self) -> list[str]:
        bundle = self.own / "bundle"
        bundle.mkdir(parents=True, exist_ok=True)
        each = container(self.pod, self.name)
        sources = {mount["name"]: self.volume(mount["name"]) for mount in each["volumeMounts"]}
        config = runc_config(each, self._command, self.root, sources)
        (bundle / "config.json").write_text(json.dumps(config))
        runc = [str(RUNC), "--root", str(self.own / "runc")]
        return [*runc, "run", "--bundle", str(bundle), self._id]

    @property
    def _id(self) -> str:
        return f"{self.own.parent.name}-{self.own.name}"

    def _by_namespaces(self) -> list[str]:
        each = container(self.pod, self.name)
        steps = [f"mount --bind {self.root} {self.root}"]
        steps.append(f"mount -o remount,bind,ro {self.root}")
        for mount in each["volumeMounts"]:
            source = self.volume(mount["name"])
            steps.append(f"mount --rbind {source} {self.root}{mount['mountPath']}")
        steps.append(f"mount -t proc proc {self.root}/proc")
        steps += [f"mount --rbind /{name} {self.root}/{name}" for name in ("dev", "sys")]
        context = each["securityContext"]
        added = context.get("capabilities", {}).get("add", [])
        kept = ",".join(["-all", *(f"+{name.lower()}" for name in added)])
        rights = f"setpriv --no-new-privs --bounding-set={kept} --inh-caps=-all"
        if context.get("privileged"):
            rights = ""
        command = " ".join(self._command)
        steps.append(f"exec chroot {self.root} env -i {PATH} {rights} {command}")
        return [*_ISOLATED, "sh", "-c", " && ".join(steps)]

    def volume(self, name: str) -> Path:
        """Where a volume of the pod is here."""
        path = host_path(self.pod, name)
        place = self.own / name if path is None else self.host.at(path)
        place.mkdir(parents=True, exist_ok=True)
        return place

    def path(self, inside: str) -> Path:
        """Where a path in one of the container's volumes is here."""
        for mount in container(self.pod, self.name)["volumeMounts"]:
            if Path(inside).is_relative_to(mount["mountPath"]):
                return self.volume(mount["name"]) / Path(inside).relative_to(mount["mountPath"])
        raise ValueError(inside)

    def wait_for(self, inside: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not self.path(inside).exists():
            assert self._process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, self.log.read_text()[-2000:]
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill every process in it at one instant, as the kernel does for a container."""
        if self._process is not None:
            if RUNC:
                self._runc("kill", self._id, "KILL")
            else:
                self._process.kill()
            self._process.wait(LIMIT_S)
            self._process = None

    def _runc(self, *arguments: str) -> None:
        runc = [str(RUNC), "--root", str(self.own / "runc")]
        subprocess.run([*runc, *arguments], check=True, timeout=LIMIT_S)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.own, ignore_errors=True)
