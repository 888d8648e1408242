"""A node under any order of calls, kills, roll-outs, reboots and rotated keys, against a model.

Three pods of different fsGroups use the volumes of two identities. Whatever has happened,
publishing (again) ends with the right bytes readable, shown with the pod's group; no pod ever reads
the other identity's; no object is lost; and when all have gone, nothing is left.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from hypothesis.strategies import sampled_from

from tests.support.csi.daemons import DaemonsProcess
from tests.support.csi.node import Node, capability, until_final
from tests.support.csi.rights import allow, reboot, retire
from tests.support.servers.buckets import Bucket, keys
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import PATIENCE_S, in_storms
from tests.support.waiting import until

# With their groups.
PODS = {"pod-0": 2000, "pod-1": 2001, "pod-2": 2002}
IDENTITIES = ("x", "y")
FLAGS = ("--daemons=there",)


@pytest.fixture(scope="module")
def data(shared: Bucket) -> Bucket:
    for name in IDENTITIES:
        shared.put(f"{name}/hello", f"of {name}".encode())
    return shared


class NodeModel(RuleBasedStateMachine):
    """What each pod has, and each identity's present keys."""

    def __init__(self, s3: S3Server, node: Node, data: Bucket) -> None:
        super().__init__()
        self.s3 = s3
        self.node = node
        self.data = data
        self.used: dict[str, str] = {}
        self.generations = dict.fromkeys(IDENTITIES, 0)
        self.secrets = {name: self.new_keys(name) for name in IDENTITIES}
        self.pods_of_daemons = 0
        self.daemons = self.start_daemons()

    def start_daemons(self) -> DaemonsProcess:
        self.pods_of_daemons += 1
        daemons = DaemonsProcess(self.node, f"daemons-{self.pods_of_daemons}")
        until(lambda: daemons.is_ready, "daemons can be started")
        return daemons

    def new_keys(self, name: str) -> dict[str, str]:
        return allow(self.s3, f"{name}{self.generations[name]}", self.data.name, f"{name}/")

    @rule(pod=sampled_from(tuple(PODS)), name=sampled_from(IDENTITIES))
    def publish(self, pod: str, name: str) -> None:
        name = self.used.setdefault(pod, name)
        target = self.node.target(pod)
        until_final(
            self.node.publish,
            f"volume-{name}",
            target,
            secrets=self.secrets[name],
            bucket=self.data.name,
            prefix=name,
            metadataTtl="0s",
            cap=capability(group=str(PODS[pod])),
        )
        wanted = f"of {name}"
        assert read(target) in (wanted, "", "denied")  # never another's
        until(lambda: read(target) == wanted, f"{pod} reads")
        assert (target / "hello").stat().st_gid == PODS[pod]

    @precondition(lambda self: self.used)
    @rule(pod=sampled_from(tuple(PODS)))
    def unpublish(self, pod: str) -> None:
        name = self.used.pop(pod, IDENTITIES[0])
        until_final(self.node.unpublish, f"volume-{name}", self.node.target(pod))

    @rule(whom=sampled_from(("driver", "keeper", "fusefs.daemon", "", "daemons", "node")))
    def kill(self, whom: str) -> None:
        if whom in ("driver", "node"):
            self.node.kill()
            if whom == "node":
                self.node.kill_all("keeper")
            self.node.start("--daemons=there")
        elif whom == "daemons":
            self.daemons.kill()
            self.daemons = self.start_daemons()
        else:
            self.node.kill_all(whom)

    @rule()
    def roll_out(self) -> None:
        old, self.daemons = self.daemons, self.start_daemons()
        old.process.terminate()
        assert old.process.wait(PATIENCE_S) == 0

    @precondition(lambda self: self.used)
    @rule()
    def reboot(self) -> None:
        self.daemons.kill()
        reboot(self.node)
        self.used.clear()
        self.daemons = self.start_daemons()
        self.node.start("--daemons=there")

    @rule(name=sampled_from(IDENTITIES))
    def rotate(self, name: str) -> None:
        old = f"{name}{self.generations[name]}"
        self.generations[name] += 1
        self.secrets[name] = self.new_keys(name)
        for pod in [pod for pod, user in self.used.items() if user == name]:
            self.publish(pod=pod, name=name)
        retire(self.s3, old)

    @invariant()
    def no_pod_reads_what_is_not_its_own(self) -> None:
        for pod, name in self.used.items():
            assert read(self.node.target(pod)) in (f"of {name}", "", "denied")

    @invariant()
    def references_are_the_mounts(self) -> None:
        """Pods have their volumes and no other process has; each mount is bound by some pod."""
        roots = {one.device for one in self.node.roots()}
        bound = [one for one in self.node.mounted() if one.mountpoint.parent != self.node.mounts]
        assert {one.mountpoint for one in bound} == {self.node.target(pod) for pod in self.used}
        # Of those that died, what is bound lies below what was made anew.
        assert roots <= {one.device for one in bound}

    def teardown(self) -> None:
        try:
            self.unpublish_all()
        finally:
            self.daemons.clean_up()

    def unpublish_all(self) -> None:
        for pod in PODS:  # a reboot leaves paths behind, which kubelet takes back as well
            name = self.used.get(pod, IDENTITIES[0])
            until_final(self.node.unpublish, f"volume-{name}", self.node.target(pod))
        until(lambda: self.node.leftovers() == [], "nothing is left")
        assert keys(self.data) == ["x/hello", "y/hello"]


def read(target: Path) -> str:
    try:
        return (target / "hello").read_text()
    except PermissionError:
        return "denied"
    except OSError:
        return ""


@in_storms("examples_and_steps", (1, 6), (20, 20))
def test_a_node_keeps_its_promises_in_any_order_of_events(
    s3: S3Server, running: Node, data: Bucket, examples_and_steps: tuple[int, int]
) -> None:
    examples, steps = examples_and_steps
    run_state_machine_as_test(
        lambda: NodeModel(s3, running, data),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
