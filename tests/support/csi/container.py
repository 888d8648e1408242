"""A pod's container on a node: a real OCI container, made by runc as kubelet's runtime does."""

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.csi.node import Node
from tests.support.csi.pod import READER, USER, Pod


@contextmanager
def container_reading(
    node: Node,
    volume: Path,
    name: str,
    *,
    read_only: bool = False,
    code: str = READER,
    gains_rights: bool = False,
) -> Iterator[Pod]:
    """A container of an ordinary user that has the volume at /data and its file `name` open.

    With `gains_rights` setuid programs work in it, as they do in pods that say nothing of it.
    """
    bundle = Path(tempfile.mkdtemp(prefix="container", dir=node.directory))
    rootfs = bundle / "rootfs"
    for directory in ("proc", "dev", "usr", "python", "data"):
        (rootfs / directory).mkdir(parents=True)
    for link in ("bin", "lib", "lib64"):
        (rootfs / link).symlink_to(f"usr/{link}")
    python = Path(node.command[0])
    arguments = ["/python/bin/" + python.name, "-c", code, f"/data/{name}"]
    config = _config(arguments, python.parents[1], volume, read_only=read_only)
    config["process"]["noNewPrivileges"] = not gains_rights
    (bundle / "config.json").write_text(json.dumps(config))
    runc = ["runc", "--root", str(bundle / "state")]
    process = subprocess.Popen(
        [*runc, "run", "--bundle", bundle, bundle.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pod = Pod(process)
        assert pod.answer() == "ready"
        yield pod
    finally:
        with contextlib.suppress(OSError):
            subprocess.run([*runc, "kill", bundle.name, "KILL"], check=False, timeout=60)
        process.wait(60)
        shutil.rmtree(bundle, ignore_errors=True)


def _config(arguments: list[str], python: Path, volume: Path, *, read_only: bool) -> dict[str, Any]:
    def bind(source: str, target: str, *options: str) -> dict[str, Any]:
        return {
            "destination": target,
            "type": "bind",
            "source": source,
            "options": ["rbind", *options],
        }

    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": USER, "gid": USER},
            "args": arguments,
            "cwd": "/",
            "env": ["LD_LIBRARY_PATH=/python/lib"],
        },
        "root": {"path": "rootfs", "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]},
            bind("/usr", "/usr", "ro"),
            bind(str(python), "/python", "ro"),
            bind(str(volume), "/data", "rslave", "ro" if read_only else "rw"),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
            "rootfsPropagation": "rslave",
        },
    }
