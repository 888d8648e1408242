"""A cluster under test: this machine's own, or any that KUBECONFIG names."""

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.node import Node

NAMESPACE = "fusefs-csi"


class CommandError(Exception):
    """A command failed; the text is the command and what it said."""


@dataclass
class Cluster:
    """Access to a cluster, and what the driver is installed with there.

    `store` is the S3 endpoint as pods reach it. The keys are pairs of id and secret: the
    controller's, and those of pods. `nodes` are this machine's, and none are another cluster's.
    """

    kubeconfig: Path
    programs: Path
    logs: Path
    image: str
    store: str
    controller_keys: tuple[str, str]
    pod_keys: tuple[str, str]
    nodes: list[Node] = field(default_factory=list)

    def command(self, *arguments: str) -> list[str]:
        """What runs a command where the API server can be reached."""
        return self.nodes[0].command(*arguments) if self.nodes else list(arguments)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.programs}:{os.environ['PATH']}"
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": path}

    def run(self, *arguments: str, text: str | None = None, limit_s: float = 600) -> str:
        """Run a command; returns its standard output. `text` is its standard input.

        Raises:
            CommandError: it failed.
        """
        done = subprocess.run(
            self.command(*arguments),
            input=text,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=limit_s,
        )
        if done.returncode:
            said = (done.stderr or done.stdout)[-2000:]
            raise CommandError(f"{' '.join(arguments)[:300]}: {said}")
        return done.stdout

    def kubectl(self, *arguments: str, text: str | None = None, limit_s: float = 600) -> str:
        return self.run("kubectl", *arguments, text=text, limit_s=limit_s)

    def apply(self, *objects: dict[str, Any], namespace: str = "default") -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(listed))

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))
