"""A pod on a node: an ordinary user's process in a mount namespace of its own.

Its mounts are slaves of the node's, which is Kubernetes' `HostToContainer`:
what is stacked on the volume later arrives.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.csi.node import Node

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
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """What the open file and the file opened anew say, or an error."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def read(self) -> str:
        self.ask()
        return self.answer()


@contextmanager
def pod_reading(node: Node, path: Path) -> Iterator[Pod]:
    """A pod that has `path` open, which is gone at the end whatever happened."""
    command = [
        "unshare",
        "--mount",
        "--propagation",
        "slave",
        "setpriv",
        "--reuid",
        str(USER),
        "--regid",
        str(USER),
        "--clear-groups",
        node.command[0],
        "-c",
        READER,
        str(path),
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
