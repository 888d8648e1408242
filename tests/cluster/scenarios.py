"""The driver's own tests as pods. Each scenario is a function of the cluster.

It returns a line of figures, and raises AssertionError or CommandError if it fails. Those of
`ON_NODES` end nodes or processes on them, so they need this machine's own cluster, with two nodes.
"""

import json
import time
from collections.abc import Callable
from functools import partial

import yaml

from tests.cluster.cluster import NAMESPACE, Cluster
from tests.cluster.control_plane import NEXT_KEYS
from tests.cluster.install import secret_object
from tests.cluster.node import CONTROL, Node
from tests.cluster.pods import (
    CLASS,
    RESTRICTED,
    Namespace,
    Object,
    by_claim,
    claim,
    load,
    pod,
    until,
)
from tests.support.csi.oidc import ROLE
from tests.support.packaging.image import PROJECT

# The number of pods' mounts on a node.
_MOUNTED = "grep -c ' /var/lib/kubelet/.*kubernetes.io~csi.* fuse' /proc/self/mountinfo"
WAIT = "sleep infinity & wait"
# Saves a step at a time together with the other pod, and goes on from the last that both saved.
_TRAIN = """
cd /v; me=$JOB_COMPLETION_INDEX; step=12
until [ $step = 0 ] || [ -e step-$step/part-0 -a -e step-$step/part-1 ]; do step=$((step - 1)); done
test $step = 0 || echo "$me from $step" >> resumed-$me
while [ "$step" -lt 12 ]; do
    step=$((step + 1)); mkdir -p step-$step
    head -c 200000 /dev/zero | tr '\\0' "$me" > step-$step/part-$me.tmp
    mv step-$step/part-$me.tmp step-$step/part-$me
    until [ -e step-$step/part-$((1 - me)) ]; do sleep 0.2; done
    sleep 1
done
"""


def kinds_of_mounts(cluster: Cluster) -> str:
    """Static and inline volumes, subPath, subPathExpr, readOnly beside writing, fsGroup, 65534."""
    image = cluster.image
    with Namespace(cluster, "kinds", "restricted") as space:
        space.apply(claim("c"))
        plain = {"context": RESTRICTED, "group": 2000}
        write = "id -u; echo one > /v/$POD && mkdir -p /v/sub && echo two > /v/sub/two"
        space.succeeds(pod(image, "writer", write, by_claim("c"), **plain))
        sub = {"subPath": "sub"}
        expression = {"subPathExpr": "$(POD)"}
        refused = "! echo x > /v/x 2>/dev/null && cat /v/writer"
        reader = pod(image, "reader", refused, by_claim("c", readOnly=True), **plain)
        other = {"context": {**RESTRICTED, "runAsUser": 1000}, "group": 3000}
        space.succeeds(
            pod(image, "sub", "test $(cat /v/two) = two", by_claim("c"), mount=sub, **plain),
            pod(image, "expr", "echo mine > /v/f", by_claim("c"), mount=expression, **plain),
            reader,
            pod(image, "group", "echo 3000 >> /v/writer && cat /v/writer", by_claim("c"), **other),
        )
        check = "test $(cat /v/expr/f) = mine && grep -q 3000 /v/writer"
        space.succeeds(pod(image, "check", check, by_claim("c"), **plain))
    with Namespace(cluster, "static") as space:
        attributes = {"store": "tests", "bucket": "volumes", "prefix": "static/"}
        secret = {"nodePublishSecretRef": {"name": "fusefs-s3", "namespace": "default"}}
        cluster.apply(_static(space.name, attributes, **secret))
        bound = claim("static", "")
        bound["spec"]["volumeName"] = space.name
        space.succeeds(
            bound, pod(image, "static", "echo static > /v/s && cat /v/s", by_claim("static"))
        )
        space.kubectl("delete", "pod/static", "pvc/static")
        cluster.kubectl("delete", "pv", space.name)
    return "9 pods"


def _static(name: str, attributes: dict[str, str], **more: Object) -> Object:
    """A PersistentVolume that an administrator made; `more` goes below its `csi`."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "csi": {
                "driver": "s3.csi.fusefs.dev",
                "volumeHandle": name,
                "volumeAttributes": attributes,
                **more,
            },
        },
    }


def inline_and_warm(cluster: Cluster) -> str:
    """An inline volume that is fetched before its pod starts."""
    attributes = {"store": "tests", "bucket": "inline", "prefix": "warm/", "anonymous": "true"}
    driver: Object = {"driver": "s3.csi.fusefs.dev", "volumeAttributes": attributes}
    write = "for i in 1 2 3; do head -c 3000000 /dev/urandom > /v/$i; done"
    with Namespace(cluster, "inline", "privileged") as space:
        space.succeeds(pod(cluster.image, "writer", write, {"name": "v", "csi": driver}))
        warm = {**attributes, "warm": ".", "warmBeforePublish": "true"}
        volume = {"name": "v", "csi": {**driver, "volumeAttributes": warm}}
        check = "test $(du -sb /v | cut -f1) -ge 9000000"
        space.succeeds(pod(cluster.image, "reader", check, volume))
    return "9 MB before the pod"


def a_planned_job(cluster: Cluster) -> str:
    """The example of a Job that tells the mount what it will read, by the mount's own file."""
    with Namespace(cluster, "planned") as space:
        text = (PROJECT / "examples/kubernetes/planned-job.yaml").read_text()
        volume, bound, job = yaml.safe_load_all(text.replace("default", space.name))
        attributes = {"store": "tests", "bucket": "volumes", "prefix": "planned/"}
        volume["spec"]["csi"]["volumeAttributes"] = attributes
        volume["spec"]["csi"]["nodePublishSecretRef"] = {
            "name": "fusefs-s3",
            "namespace": "default",
        }
        job["spec"]["template"]["spec"]["containers"][0]["image"] = cluster.image
        name = bound["metadata"]["name"]
        write = "for i in $(seq 100); do head -c 100000 /dev/urandom > /v/$i; done"
        space.succeeds(volume, bound, pod(cluster.image, "writer", write, by_claim(name)))
        space.apply(job)
        space.wait("job/train-in-order", "condition=Complete")
        [plan] = json.loads(space.kubectl("logs", "job/train-in-order"))["plans"]
        space.kubectl("delete", "job/train-in-order", "pod/writer", f"pvc/{name}", "--wait")
        cluster.kubectl("delete", "pv", name)
    assert plan["opens"] == plan["entries"] == 100, plan
    return f"{plan['in_time']} of 100 opens in time"


def a_hundred_pods(cluster: Cluster) -> str:
    """A hundred pods of one claim at once."""
    write = "echo $POD > /v/$POD && test $(cat /v/$POD) = $POD"
    with Namespace(cluster, "hundred") as space:
        space.apply(claim("c"))
        begin = time.monotonic()
        pods = [pod(cluster.image, f"p{i}", write, by_claim("c")) for i in range(100)]
        space.succeeds(*pods, limit_s=600)
        took = time.monotonic() - begin
        count = "test $(ls /v | wc -l) = 100"
        space.succeeds(pod(cluster.image, "check", count, by_claim("c")))
    return f"{took:.0f} s"


def fifty_claims(cluster: Cluster) -> str:
    """Fifty claims at once; they are bound in the time that the driver and the API server need."""
    with Namespace(cluster, "claims") as space:
        begin = time.monotonic()
        space.apply(*(claim(f"c{i}") for i in range(50)))
        phases = "jsonpath={.items[*].status.phase}"
        until(
            lambda: space.kubectl("get", "pvc", "-o", phases).split() == ["Bound"] * 50,
            "fifty claims are bound",
        )
        took = time.monotonic() - begin
    return f"{took:.1f} s"


def a_job_is_drained_and_resumes(cluster: Cluster) -> str:
    """Two pods save checkpoints together, are evicted, and go on from the last."""
    trainer = pod(cluster.image, "t", _TRAIN, by_claim("c"))["spec"]
    trainer["restartPolicy"] = "Never"
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "train"},
        "spec": {
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "backoffLimit": 10,
            "template": {"metadata": {"labels": {"app": "train"}}, "spec": trainer},
        },
    }
    with Namespace(cluster, "job") as space:
        space.ready(claim("c"), pod(cluster.image, "watch", WAIT, by_claim("c")))
        space.apply(job)
        see = ("exec", "watch", "--", "sh", "-c")
        until(lambda: space.kubectl(*see, "ls -d /v/step-4 2>/dev/null || true") != "", "step 4")
        where = "jsonpath={.items[*].spec.nodeName}"
        for node in set(space.kubectl("get", "pods", "-l", "app=train", "-o", where).split()):
            cluster.kubectl(
                "drain", node, "--pod-selector=app=train", "--ignore-daemonsets", "--force"
            )
            cluster.kubectl("uncordon", node)
        space.wait("job/train", "condition=Complete", 300)
        check = "cat /v/resumed-* && test $(ls /v/step-12 | wc -l) = 2"
        resumed = space.kubectl(*see, check)
        sizes = space.kubectl(*see, "stat -c %s /v/step-*/part-? | sort -u").split()
        assert sizes == ["200000"], sizes
    return "; ".join(resumed.splitlines())


def roll_outs(cluster: Cluster) -> str:
    """Both DaemonSets are rolled out under readers and writers."""
    with _UnderLoad(cluster, "rollout") as (space, names):
        for name in ("daemons", "node"):
            workload = f"daemonset/fusefs-csi-{name}"
            cluster.kubectl("-n", NAMESPACE, "rollout", "restart", workload)
            cluster.kubectl("-n", NAMESPACE, "rollout", "status", workload, "--timeout=300s")
            space.goes_on(*names)
        return _figures(space, names)


class _UnderLoad:
    """A pod of `load` on each node, in a namespace of their own."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._space = Namespace(cluster, name)
        self._cluster = cluster

    def __enter__(self) -> tuple[Namespace, list[str]]:
        space = self._space.__enter__()
        nodes = [each["metadata"]["name"] for each in self._cluster.get("nodes")["items"]]
        names = [f"load-{node}" for node in nodes]
        pods = [load(self._cluster.image, f"load-{node}", "c", node) for node in nodes]
        space.ready(claim("c"), *pods)
        space.goes_on(*names)
        return space, names

    def __exit__(self, *exception: object) -> None:
        self._space.__exit__(*exception)


def _figures(space: Namespace, names: list[str]) -> str:
    """The errors of pods of `load`, none of which may have any or have been restarted."""
    reports = [space.report(name) for name in names]
    states = "jsonpath={.items[*].status.containerStatuses[*].restartCount}"
    assert set(space.kubectl("get", "pods", "-o", states).split()) == {"0"}
    errors = sum(report["errors"] for report in reports)
    assert errors == 0, [space.kubectl("logs", name, "--tail=100") for name in names]
    rounds = sum(report["rounds"] for report in reports)
    longest = max(report["longest"] for report in reports)
    return f"{rounds:.0f} rounds, 0 errors, longest pause {longest:.1f} s"


def two_groups_of_a_claim(cluster: Cluster) -> str:
    """Pods of two fsGroups on one node share a mount; each sees its own group, and no old file."""
    node, both = cluster.nodes[0], (2000, 3000)
    with Namespace(cluster, "groups", "restricted") as space:
        plain = partial(pod, cluster.image, node=node.name)
        space.apply(claim("c"))
        for group in both:
            context = {**RESTRICTED, "runAsUser": group}
            name = f"group-{group}"
            space.ready(plain(name, WAIT, by_claim("c"), context=context, group=group))
        count = "grep -c ' /var/lib/kubelet/plugins/.* fuse' /proc/self/mountinfo"
        until(partial(_says, node, count, "1"), "the node has one mount")

        def of(group: int, script: str) -> list[str]:
            return space.kubectl("exec", f"group-{group}", "--", "sh", "-c", script).split()

        for one, other in (both, both[::-1]):
            of(one, f"umask 007; echo {one} > /v/f")
            seen = of(other, f"cat /v/f; echo {other} >> /v/f; stat -c %g /v /v/f")
            assert seen == [f"{one}", f"{other}", f"{other}"], seen
            assert of(one, "cat /v/f; chmod 600 /v/f") == [f"{one}", f"{other}"]
            of(other, "! echo x 2>/dev/null >> /v/f")
            of(one, "rm /v/f")
            assert of(other, "ls /v") == []
    return "one mount"


def a_secret_is_renewed(cluster: Cluster) -> str:
    """The keys of running mounts change, and the daemons are given the new ones."""
    with _UnderLoad(cluster, "secret") as (space, names):
        cluster.apply(secret_object("fusefs-s3", *NEXT_KEYS))
        # Kubelet publishes again, with the Secret as it is, every minute or two.
        has_them = f"grep -rq {NEXT_KEYS[1]} /run/fusefs-csi && echo yes"
        for node in cluster.nodes:
            until(partial(_says, node, has_them, "yes"), f"{node.name} has the keys")
        space.goes_on(*names)
        figures = _figures(space, names)
    cluster.apply(secret_object("fusefs-s3", *cluster.pod_keys))
    return figures


def tokens_of_pods(cluster: Cluster) -> str:
    """An account's token is exchanged for a role, also the next one; another account is refused."""
    node = cluster.nodes[0]
    name = "tokens"
    attributes = {"store": "tests", "bucket": "volumes", "prefix": "tokens/", "roleArn": ROLE}
    cluster.apply(_static(name, attributes))
    bound = claim("c", "")
    bound["spec"]["volumeName"] = name
    with Namespace(cluster, name) as space:
        space.kubectl("create", "serviceaccount", "trainer")
        trainer = load(cluster.image, "load", "c", node.name)
        trainer["spec"]["serviceAccountName"] = "trainer"
        space.ready(bound, trainer)
        space.goes_on("load")
        space.apply(pod(cluster.image, "stranger", "ls /v", by_claim("c"), node=node.name))
        until(lambda: "access denied" in space.kubectl("get", "events"), "the stranger is refused")
        space.kubectl("delete", "pod/stranger")
        sums = "sha256sum /run/fusefs-csi/*/*/token | sort"
        before = node.output(sums)
        # Kubelet keeps a token for 48 minutes, but not over its own end.
        node.shell("/run/bin/systemctl restart kubelet")
        until(lambda: node.output(sums) not in (before, ""), "kubelet brings another token")
        cluster.run("sh", "-c", f"until kubectl -n {space.name} logs load; do sleep 1; done")
        space.goes_on("load")
        report = space.report("load")
        assert report["errors"] == 0, report
    cluster.kubectl("delete", "pv", name)
    return f"{report['rounds']:.0f} rounds, 0 errors; another account was refused"


def network_policies(cluster: Cluster) -> str:
    """The driver's pods reach the store and no other server, and nobody reaches them."""
    image = cluster.image
    volume: Object = {"name": "v", "emptyDir": {}}
    serving = pod(image, "policies", f"cd /v; python3 -m http.server 8765 & {WAIT}", volume)
    serving["spec"]["containers"][0]["readinessProbe"] = {"tcpSocket": {"port": 8765}}
    with Namespace(cluster, "policies") as space:
        space.ready(pod(image, "stranger", f"python3 -m http.server 8765 & {WAIT}", volume))
        cluster.apply(serving, namespace=NAMESPACE)
        driver = ("-n", NAMESPACE, "exec", "policies", "--")
        stranger = ("-n", space.name, "exec", "stranger", "--")
        try:
            cluster.kubectl("-n", NAMESPACE, "wait", "--for=condition=Ready", "pod/policies")
            address = "jsonpath={.status.podIP}"
            of_driver = cluster.kubectl("-n", NAMESPACE, "get", "pod/policies", "-o", address)
            of_stranger = space.kubectl("get", "pod/stranger", "-o", address)
            # What no policy forbids is answered, so a refusal is a policy's.
            for port in (8333, 8888):
                assert _connects(cluster, stranger, CONTROL, port), port
            assert _connects(cluster, stranger, of_stranger, 8765)
            assert _connects(cluster, driver, CONTROL, 8333), "the driver does not reach the store"
            assert not _connects(cluster, driver, CONTROL, 8888), "a port that is no store's"
            assert not _connects(cluster, driver, of_stranger, 8765), "another pod"
            assert not _connects(cluster, stranger, of_driver, 8765), "the driver accepts"
        finally:
            cluster.kubectl("-n", NAMESPACE, "delete", "pod", "policies")
    return "the store is reached, three other ways are closed"


def _connects(cluster: Cluster, within: tuple[str, ...], host: str, port: int) -> bool:
    """True if a pod, named by `kubectl exec`'s arguments, can open a TCP connection."""
    script = (
        "import socket\n"
        f"try: socket.create_connection(({host!r}, {port}), 5)\n"
        "except OSError: print('no')\n"
        "else: print('yes')"
    )
    return cluster.kubectl(*within, "python3", "-c", script).strip() == "yes"


def deletions(cluster: Cluster) -> str:
    """Namespace, claims and class are deleted in any order; nothing stays behind."""
    copy = cluster.get("storageclass", CLASS)
    copy["metadata"] = {"name": "short-lived"}
    cluster.apply(copy)
    with Namespace(cluster, "deleted") as space:
        for i in range(3):
            space.ready(
                claim(f"c{i}", "short-lived"), pod(cluster.image, f"p{i}", WAIT, by_claim(f"c{i}"))
            )
        space.kubectl("delete", "pvc", "c0", "--wait=false")
        cluster.kubectl("delete", "storageclass", "short-lived")
        space.kubectl("delete", "pod", "p0")
        space.kubectl("delete", "pod", "p1", "--force", "--grace-period=0")
    until(lambda: space.name not in cluster.kubectl("get", "pv"), "the volumes are gone")
    return "3 claims"


def every_container_is_killed(cluster: Cluster) -> str:
    """kill -9 of each container of each of the driver's pods, one after the other, under load."""
    node = cluster.nodes[0]
    with _UnderLoad(cluster, "killed") as (space, names):
        where = f"spec.nodeName={node.name}"
        pods = cluster.get("-n", NAMESPACE, "pods", "--field-selector", where)["items"]
        count = 0
        for each in pods:
            for status in each["status"]["containerStatuses"]:
                container = status["containerID"].removeprefix("containerd://")
                node.shell(f"ctr -n k8s.io task kill -s KILL {container}")
                count += 1
                what = (each["metadata"]["name"], status["name"], status["restartCount"])
                until(partial(_is_back, cluster, *what), f"{what} is back")
                space.goes_on(*names)
        return f"{count} containers, {_figures(space, names)}"


def _is_back(cluster: Cluster, pod_name: str, container: str, restarts: int) -> bool:
    found = cluster.get("-n", NAMESPACE, "pod", pod_name)["status"]["containerStatuses"]
    [status] = (each for each in found if each["name"] == container)
    return bool(status["restartCount"] > restarts and status["ready"])


def a_node_is_rebooted(cluster: Cluster, restart: Callable[[], None]) -> str:
    """Everything on the second node ends; when it is back, so are its pods, once each."""
    node = cluster.nodes[1]
    with Namespace(cluster, "reboot") as space:
        space.ready(claim("c"), load(cluster.image, "load", "c", node.name))
        space.goes_on("load")
        begin = time.monotonic()
        node.stop()
        restart()
        until(lambda: _restarts(space) > 0, "the container is started again")
        space.goes_on("load")
        took = time.monotonic() - begin
        report = space.report("load")
        assert report["errors"] == 0, report
        assert _says(node, _MOUNTED, "1")
    until(partial(_says, node, _MOUNTED, "0"), "nothing stays mounted")
    return f"back in {took:.0f} s, {report['rounds']:.0f} rounds, 0 errors"


def _says(node: Node, script: str, expected: str) -> bool:
    """True if a shell script on a node prints what is expected."""
    return node.output(script) == expected


def _restarts(space: Namespace) -> int:
    return int(space.get("pod", "load")["status"]["containerStatuses"][0]["restartCount"])


def a_node_disappears(cluster: Cluster, restart: Callable[[], None]) -> str:
    """A node with a writer is gone; what was closed is there for the next pod, elsewhere."""
    node = cluster.nodes[1]
    write = f"for i in 1 2 3; do echo $i > /v/$i; done; touch /v/done; {WAIT}"
    with Namespace(cluster, "gone") as space:
        space.ready(claim("c"), pod(cluster.image, "writer", write, by_claim("c"), node=node.name))
        see = ("exec", "writer", "--", "sh", "-c", "ls /v")
        until(lambda: "done" in space.kubectl(*see), "the writer has written")
        node.stop()
        begin = time.monotonic()
        check = "test $(cat /v/1 /v/2 /v/3 | tr -d '\\n') = 123"
        first = cluster.nodes[0].name
        space.succeeds(pod(cluster.image, "next", check, by_claim("c"), node=first))
        took = time.monotonic() - begin
        restart()
    return f"read on the other node {took:.0f} s later"


ANYWHERE = (
    kinds_of_mounts,
    inline_and_warm,
    a_planned_job,
    fifty_claims,
    a_hundred_pods,
    a_job_is_drained_and_resumes,
    roll_outs,
    deletions,
)
ON_NODES = (
    network_policies,
    two_groups_of_a_claim,
    a_secret_is_renewed,
    tokens_of_pods,
    every_container_is_killed,
)
WITH_RESTART = (a_node_is_rebooted, a_node_disappears)
