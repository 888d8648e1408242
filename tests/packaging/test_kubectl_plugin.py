"""The kubectl plugin, run with a kubectl that has two nodes, of which one may fail."""

import json
import os
import subprocess
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "packaging/kubectl-fusefs"
# Answers like kubectl 1.37; it writes each command line down.
KUBECTL = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
*"get pods"*nodeName=none* | "--namespace empty get pods"*) ;;
"--namespace refused get pods"*) exit 1 ;;
*"get pods"*) printf 'driver-a node-a\\ndriver-b node-b\\n' ;;
*driver-b*) [ -z "${FAILS:-}" ] || exit 1; echo '[]' ;;
*) echo '[]' ;;
esac
"""


@pytest.fixture
def kubectl(tmp_path: Path) -> Path:
    path = tmp_path / "kubectl"
    path.write_text(KUBECTL)
    path.chmod(0o755)
    return tmp_path


def run(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": f"{directory}:{os.environ['PATH']}", "LOG": str(directory / "log")}
    return subprocess.run(
        [PLUGIN, *arguments], env={**variables, **environment}, capture_output=True, text=True
    )


def test_every_node_is_listed(kubectl: Path) -> None:
    done = run(kubectl, "list")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "== node-a\n[]\n== node-b\n[]\n"
    log = (kubectl / "log").read_text()
    assert "--namespace fusefs-csi exec driver-b --container driver -- fusefs-csi list" in log


def test_all_nodes_make_one_document(kubectl: Path) -> None:
    assert json.loads(run(kubectl, "list", "--json").stdout) == {"node-a": [], "node-b": []}
    failed = run(kubectl, "list", "--json", FAILS="1")
    assert json.loads(failed.stdout) == {"node-a": [], "node-b": None}
    assert failed.returncode == 1


@pytest.mark.parametrize("arguments", [("list",), ("list", "--json"), ("status",)])
def test_a_namespace_without_a_driver_is_not_one_without_volumes(
    kubectl: Path, arguments: tuple[str, ...]
) -> None:
    done = run(kubectl, *arguments, FUSEFS_CSI_NAMESPACE="empty")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no driver runs in namespace empty" in done.stderr
    refused = run(kubectl, *arguments, FUSEFS_CSI_NAMESPACE="refused")
    assert (refused.returncode, refused.stdout, refused.stderr) == (1, "", "")


def test_a_node_that_fails_does_not_hide_the_others(kubectl: Path) -> None:
    done = run(kubectl, "status", FAILS="1")
    assert done.returncode == 1
    assert "node-a" in done.stdout


def test_a_node_can_be_chosen(kubectl: Path) -> None:
    run(kubectl, "status", "node-a", "--json", FUSEFS_CSI_NAMESPACE="elsewhere")
    log = (kubectl / "log").read_text()
    assert "--namespace elsewhere" in log
    assert "spec.nodeName=node-a" in log
    assert "-- fusefs status --json" in log
    assert "no driver runs on node none" in run(kubectl, "status", "none").stderr


def test_a_flag_is_no_node(kubectl: Path) -> None:
    done = run(kubectl, "status", "--json")
    assert (done.returncode, done.stdout) == (0, "== node-a\n[]\n== node-b\n[]\n"), done.stderr
    assert "-- fusefs status --json" in (kubectl / "log").read_text()


@pytest.mark.parametrize("arguments", [[], ["lists"], ["list", "--yaml"]])
def test_a_wrong_command_line_shows_the_usage(kubectl: Path, arguments: list[str]) -> None:
    done = run(kubectl, *arguments)
    assert (done.returncode, "usage:" in done.stderr) == (2, True)
