"""Pods of one volume in mounts of their own: what happens to one is not seen by the others."""

import stat
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.csi.node import Mode, Node, capability
from tests.support.csi.pod import Pod, pod_reading
from tests.support.csi.publishing import data as data
from tests.support.csi.publishing import node as node
from tests.support.csi.publishing import running as running
from tests.support.servers.buckets import Bucket, stored
from tests.support.waiting import until

# A pod that uploads nothing has ended after it.
ENDING_S = 10.0

# For each line of its input it reads the file anew, and makes another beside it.
WRITER = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    try:
        found = open(sys.argv[1]).read()
        open(sys.argv[1] + "-too", "w").close()
        print(found, "written", flush=True)
    except OSError as error:
        print(found, error.strerror, flush=True)
"""


@pytest.mark.parametrize("propagation", ["private", "slave"])
def test_a_mount_that_is_made_anew_is_each_pods_own(
    node: Node, data: Bucket, propagation: str
) -> None:
    volume = {"bucket": data.name, "prefix": "a", "dirMode": "777"}
    writer, reader, other = targets = [node.target(f"pod-{number}") for number in range(3)]
    can = {writer: "hello written", reader: "hello Read-only file system", other: "hello written"}

    def publish_all() -> None:
        for target in targets:
            node.publish("volume", target, readonly=target == reader, **volume)

    def stacked() -> list[int]:
        at = [one.mountpoint for one in node.mounted()]
        return [at.count(target) for target in targets]

    def begin(stack: ExitStack, target: Path) -> Pod:
        path = target / "hello"
        return stack.enter_context(pod_reading(node, path, code=WRITER, propagation=propagation))

    with ExitStack() as stack:
        publish_all()
        pods = {target: begin(stack, target) for target in targets}
        assert {target: pods[target].read() for target in targets} == can
        node.kill_all()
        publish_all()
        publish_all()
        assert stacked() == [2, 2, 2]
        seen = {target: pods[target].read() for target in targets}
        assert (seen == can) == (propagation == "slave"), seen  # what is stacked arrives there
        pods = {target: begin(stack, target) for target in targets}
        assert {target: pods[target].read() for target in targets} == can
        node.unpublish("volume", writer)
        assert stacked() == [0, 2, 2]
        for target in (reader, other):
            assert pods[target].read() == can[target]
    for target in (reader, other):
        node.unpublish("volume", target)
    data.delete("a/hello-too")


@pytest.mark.parametrize("mode", [Mode.MULTI_NODE_MULTI_WRITER, Mode.MULTI_NODE_READER_ONLY])
def test_a_pod_ends_though_an_agent_has_a_private_copy_of_its_volume(
    node: Node, data: Bucket, mode: int
) -> None:
    target = node.target("pod")
    volume = {"bucket": data.name, "prefix": "a", "cap": capability(mode), "drainTimeout": "8s"}
    node.publish("volume", target, **volume)
    copy = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(copy, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        agent.stdout.readline()
        began = time.monotonic()
        node.unpublish("volume", target)
        assert time.monotonic() - began < ENDING_S
        assert not target.exists()
        assert len(node.daemons()) == 1  # for the agent
        node.publish("volume", target, **volume)
        assert (target / "hello").read_bytes() == b"hello"
        assert len(node.daemons()) == 1
        node.unpublish("volume", target)
        until(lambda: not node.leftovers(), "the agent's copy has ended")


def test_pods_of_two_groups_write_each_others_files(node: Node, data: Bucket) -> None:
    """They have a mount each, which is as two nodes: neither group is written into an object."""
    own = {"uid": "1000", "gid": "1000", "mode": str(stat.S_IFREG | 0o664)}
    data.put("grouped/lines", b"earlier\n", Metadata=own)  # of a driver that wrote the group
    targets = {group: node.target(f"pod-{group}") for group in (1000, 2000)}
    volume = {"bucket": data.name, "prefix": "grouped"}
    for group, target in targets.items():
        node.publish("volume", target, cap=capability(group=str(group)), **volume)
    expected = "earlier\n"
    for turn in range(4):
        for group, target in targets.items():
            append = f"echo {group} {turn} >> lines"
            user = {"user": group + 1, "group": group + 1, "extra_groups": [group]}
            subprocess.run(["sh", "-c", append], cwd=target, check=True, **user)
            expected += f"{group} {turn}\n"
            assert (target / "lines").stat().st_gid == group
            assert stored(data, "grouped/lines").decode() == expected
    for target in targets.values():
        node.unpublish("volume", target)
    data.delete("grouped/lines")
