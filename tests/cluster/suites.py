"""Kubernetes' External.Storage suite and csi-sanity, and what their reports say."""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.cluster import NAMESPACE, Cluster, CommandError
from tests.cluster.node import SSH_KEY

_STORAGE = "External.Storage.*s3.csi.fusefs.dev"
# It needs a populator's images from the network.
_NOT_HERE = "any volume data source"
_KUBELET = "/var/lib/kubelet"


@dataclass
class Report:
    """The results of one run. `skipped` counts reasons; `failed` maps specs to messages."""

    name: str
    passed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        total = sum(self.skipped.values())
        lines = [f"{self.name}: {self.passed} passed, {total} skipped, {len(self.failed)} failed"]
        lines += [f"  skipped {count}: {reason}" for reason, count in self.skipped.most_common()]
        lines += [f"  FAILED {spec}\n    {text}" for spec, text in self.failed.items()]
        return "\n".join(lines)


def parallel(cluster: Cluster, *, processes: int = 3, focus: str = "") -> Report:
    """All specs that may run beside each other, the slow ones too."""
    skip = rf"{_NOT_HERE}|\[Serial\]|\[Disruptive\]"
    return _external(cluster, "parallel", focus or _STORAGE, skip, processes)


def serial(cluster: Cluster) -> Report:
    skip = rf"{_NOT_HERE}|\[Disruptive\]"
    return _external(cluster, "serial", rf"{_STORAGE}.*\[Serial\]", skip, 1)


def disruptive(cluster: Cluster) -> Report:
    """The specs that stop a node's kubelet, over ssh."""
    key = cluster.kubeconfig.with_name(f"{SSH_KEY}.pem")
    ssh = ("env", f"KUBE_SSH_KEY_PATH={key}", "KUBE_SSH_USER=root")
    focus = rf"{_STORAGE}.*\[Disruptive\]"
    return _external(cluster, "disruptive", focus, _NOT_HERE, 1, before=ssh)


def _external(
    cluster: Cluster, name: str, focus: str, skip: str, processes: int, before: tuple[str, ...] = ()
) -> Report:
    place = cluster.logs / name
    place.mkdir(parents=True, exist_ok=True)
    command = [
        *before,
        str(cluster.programs / "ginkgo"),
        f"--procs={processes}",
        f"--focus={focus}",
        f"--skip={skip}",
        "--no-color",
        "--timeout=2h",
        str(cluster.programs / "e2e.test"),
        "--",
        f"--kubeconfig={cluster.kubeconfig}",
        f"--storage.testdriver={Path(__file__).with_name('testdriver.yaml')}",
        f"--kubectl-path={cluster.programs / 'kubectl'}",
        "--provider=local",
        "--num-nodes=-1",
        f"--report-dir={place}",
    ]
    return _run(cluster, name, command, place)


def sanity(cluster: Cluster, sidecars: Path) -> Report:
    """csi-sanity against the installed driver, by the sockets of its node and its controller."""
    place = cluster.logs / "sanity"
    place.mkdir(parents=True, exist_ok=True)
    where = f"spec.nodeName={cluster.nodes[0].name}"
    label = "app.kubernetes.io/name=fusefs-csi-controller"
    pods = cluster.get("-n", NAMESPACE, "pods", "-l", label, "--field-selector", where)["items"]
    volume = "volumes/kubernetes.io~empty-dir/socket-dir"
    # By a link: the path of a socket has 107 bytes at most.
    socket_dir = f"{_KUBELET}/pods/{pods[0]['metadata']['uid']}/{volume}"
    cluster.run("ln", "-sfn", socket_dir, "/run/controller")
    key, secret = cluster.controller_keys
    calls = ("Create", "Delete", "ControllerExpand", "NodePublish", "ControllerValidate")
    names = [f"{call}VolumeSecret" for call in calls[:-1]]
    names.append("ControllerValidateVolumeCapabilitiesSecret")
    secrets = [f"{each}: {{access_key_id: {key}, secret_access_key: {secret}}}" for each in names]
    (place / "secrets.yaml").write_text("\n".join(secrets))
    parameters = 'store: tests\nbucket: volumes\nprefix: "sanity/${pv.name}"\nonDelete: delete\n'
    (place / "parameters.yaml").write_text(parameters)
    # Not among pods: kubelet removes what is of none that it knows.
    targets = f"{_KUBELET}/plugins/sanity"
    cluster.run("mkdir", "-p", targets)
    command = [
        str(sidecars / "csi-sanity"),
        f"--csi.endpoint={_KUBELET}/plugins/s3.csi.fusefs.dev/socket/csi.sock",
        "--csi.controllerendpoint=/run/controller/csi.sock",
        f"--csi.mountdir={targets}/mount",
        f"--csi.stagingdir={targets}/staging",
        f"--csi.secrets={place / 'secrets.yaml'}",
        f"--csi.testvolumeparameters={place / 'parameters.yaml'}",
        "--csi.testvolumeexpandsize=21474836480",
        "--ginkgo.no-color",
        f"--ginkgo.junit-report={place / 'junit.xml'}",
    ]
    return _run(cluster, "csi-sanity", command, place)


def _run(cluster: Cluster, name: str, command: list[str], place: Path) -> Report:
    for old in place.glob("junit*.xml"):
        old.unlink()
    try:
        output = cluster.run(*command, limit_s=7200)
    except CommandError as error:
        output = str(error)
    (place / "output.txt").write_text(output)
    report = Report(name)
    for path in place.glob("junit*.xml"):
        _read(path, report)
    if not report.passed and not report.failed:
        report.failed["the suite"] = output[-2000:]
    return report


def _read(path: Path, report: Report) -> None:
    """Add a JUnit report of ginkgo's. What the focus left out has the message `skipped`."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = case.get("name", "")
        fault = case.find("failure")
        fault = case.find("error") if fault is None else fault
        skipped = case.find("skipped")
        if fault is not None:
            report.failed[name] = (fault.get("message") or fault.text or "")[:300]
        elif skipped is not None:
            reason = re.sub(r"^skipped( - )?(\S+\.go:\d+: )?", "", skipped.get("message") or "")
            if reason:
                report.skipped[reason[:120]] += 1
        elif name.startswith("[It]"):
            report.passed += 1
