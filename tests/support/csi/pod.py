"""A pod on a node: an ordinary user's process that has a volume in mounts of its own.

As a container it has the volume at a path of its own, and none of kubelet's directory.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.csi.node import Node
from tests.support.sharing import drop_copies

USER = 12345
# It holds a file open and, on request, reads that again and opens it anew.
READER = """
import sys
path = sys.argv[1]
held = open(path, "rb")
print("ready", flush=True)
for _ in sys.stdin:
    try:
        held.seek(0)
        print(held.read().decode(), open(path, "rb").read().decode(), flush=True)
    except OSError as error:
        print(error, flush=True)
"""


class Pod:
    """A process that reads one file of a volume."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self) -> None:
        """Have it read, without waiting for that."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """What the open file and the file opened anew say, or an error."""
        return self._process.stdout.readline().strip()

    def read(self) -> str:
        self.ask()
        return self.answer()


def without_kubelet(node: Node, propagation: str, *steps: str) -> list[str]:
    """The start of a command that runs after these steps, in mounts of its own.

    Kubelet's directory is not among them: only what the steps have bound elsewhere stays.
    """
    script = " && ".join([*steps, f"umount -lR {node.kubelet}"])
    script += f' && {drop_copies(node.directory)}exec "$@"'
    return ["unshare", "--mount", "--propagation", propagation, "sh", "-c", script, "sh"]


@contextmanager
def pod_reading(
    node: Node,
    path: Path,
    *,
    code: str = READER,
    propagation: str = "slave",
    is_read_only: bool = False,
) -> Iterator[Pod]:
    """A pod whose program has the volume's file `path`, gone at the end whatever happened.

    `propagation` is `private`, as of a container by default, or `slave` (HostToContainer).
    """
    target = next(parent for parent in path.parents if parent.name == "mount")
    with tempfile.TemporaryDirectory(prefix="pod", dir=node.directory) as data:
        Path(data).chmod(0o755)
        steps = [f"mount --rbind {target} {data}", f"mount --make-{propagation} {data}"]
        if is_read_only:
            steps.append(f"mount -o remount,bind,ro {data}")
        command = [
            *without_kubelet(node, propagation, *steps),
            *f"setpriv --reuid {USER} --regid {USER} --clear-groups".split(),
            node.command[0],
            "-c",
            code,
            str(data / path.relative_to(target)),
        ]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **node.environment},
        ) as process:
            try:
                pod = Pod(process)
                assert pod.answer() == "ready"
                yield pod
            finally:
                process.kill()
