"""The driver in a real Kubernetes: installed, tested by Kubernetes' own suites and ours, removed.

Builds what is missing, brings up two nodes on this machine, and takes them down at the end,
whatever the end is. With KUBECONFIG the cluster is that one: FUSEFS_IMAGE is the driver's image
there, FUSEFS_STORE the endpoint of an S3 server as its pods reach it, with the buckets `volumes`
and, for anybody, `inline`; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are its keys. Logs and
reports are in one folder.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tests.cluster import build, control_plane, images, scenarios, suites
from tests.cluster.cluster import NAMESPACE, Cluster, CommandError
from tests.cluster.install import install, uninstall
from tests.cluster.node import Node

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fusefs-cluster"
# The parts that run with each installation. The two make the same objects, as `make test` shows.
PARTS = {
    "chart": ("sanity", "scenarios", "parallel", "serial", "disruptive"),
    "manifests": ("sanity", "parallel"),
}


class Run:
    """One run: its steps with their times, and what failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Say when a step begins and ends. An error ends the run."""
        print(f"{name} ...", flush=True)
        begin = time.monotonic()
        yield
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)

    def try_out(self, name: str, test: Callable[[], str]) -> None:
        """Run a scenario; a failure is kept, and the next one goes on."""
        begin = time.monotonic()
        try:
            said = test()
        except (AssertionError, CommandError, OSError) as error:
            said = f"FAILED: {error or traceback.format_exc()}"
            self.failed.append(name)
        print(f"  {name} ({time.monotonic() - begin:.0f} s): {said}", flush=True)

    def suite(self, report: suites.Report) -> None:
        print(report, flush=True)
        self.failed += report.failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubernetes", choices=sorted(build.VERSIONS["kubernetes"]))
    parser.add_argument("--install", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--only", nargs="*", choices=PARTS["chart"], default=PARTS["chart"])
    parser.add_argument("--focus", default="", help="of the parallel specs, a regular expression")
    parser.add_argument("--scenario", default="", help="the scenarios with this in their names")
    parser.add_argument("--logs", type=Path, default=Path("build/cluster"))
    options = parser.parse_args()
    minor = options.kubernetes or max(build.VERSIONS["kubernetes"])
    logs = options.logs.resolve() / minor
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run()
    with run.step("building Kubernetes"):
        programs = build.kubernetes(CACHE, minor)
    with run.step("building the sidecars"):
        sidecars = build.others(CACHE)
    given = os.environ.get("KUBECONFIG")
    cluster_of = existing(Path(given), programs, logs) if given else own(run, programs, logs)
    with cluster_of as cluster:
        for kind in options.install:
            cluster.logs = logs / kind
            with run.step(f"installing from the {kind}"):
                install(cluster, kind, logs / "kustomization")
            try:
                parts = [part for part in PARTS[kind] if part in options.only]
                test(run, cluster, sidecars, parts, options)
            finally:
                keep_logs(cluster)
            with run.step("uninstalling"):
                uninstall(cluster, kind, logs / "kustomization")
    print(f"logs and reports: {logs}")
    print(f"{len(run.failed)} failed" if run.failed else "none failed")
    return bool(run.failed)


@contextmanager
def existing(kubeconfig: Path, programs: Path, logs: Path) -> Iterator[Cluster]:
    """The cluster of a kubeconfig."""
    keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    image, store = os.environ["FUSEFS_IMAGE"], os.environ["FUSEFS_STORE"]
    yield Cluster(kubeconfig.resolve(), programs, logs, image, store, keys, keys)


@contextmanager
def own(run: Run, programs: Path, logs: Path) -> Iterator[Cluster]:
    """Two nodes on this machine, from their start to their end."""
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=CACHE))
    nodes = [Node(number, directory, logs, programs, CACHE / "bin") for number in (1, 2)]
    try:
        with run.step("making the images"):
            archive = images.make(CACHE, directory, programs, CACHE / "bin")
        with run.step("starting two nodes"):
            control_plane.make_certificates(directory / "pki", nodes)
            nodes[0].start()
            control_plane.start_store(nodes[0], directory / "store")
            control_plane.start(nodes[0], directory / "pki", programs)
            cluster = Cluster(
                directory / "pki/admin.conf",
                programs,
                logs,
                images.DRIVER,
                control_plane.STORE,
                control_plane.CONTROLLER_KEYS,
                control_plane.POD_KEYS,
                nodes,
            )
            start_node(cluster, nodes[0], archive)
            nodes[1].start(nodes[0])
            start_node(cluster, nodes[1], archive)
        yield cluster
    finally:
        for node in reversed(nodes):
            node.stop()
        subprocess.run(["rm", "-rf", "--one-file-system", directory], check=True)


def start_node(cluster: Cluster, node: Node, archive: Path | None) -> None:
    """Start a node's programs; returns when pods can be scheduled to it."""
    node.start_containers(archive)
    node.start_kubelet()
    ready = ["kubectl", "wait", "--for=condition=Ready", f"node/{node.name}", "--timeout=2m"]
    for _ in range(60):
        with suppress(CommandError):
            cluster.run(*ready)
            node.start_policies()
            return
        time.sleep(1)
    raise CommandError(f"{node.name} is not ready")


def restart(cluster: Cluster) -> None:
    """Bring the second node back after a power cut."""
    first, node = cluster.nodes
    node.start(first)
    start_node(cluster, node, None)


def test(
    run: Run, cluster: Cluster, sidecars: Path, parts: list[str], options: argparse.Namespace
) -> None:
    """Run these parts."""
    if "sanity" in parts and cluster.nodes:
        with run.step("csi-sanity"):
            run.suite(suites.sanity(cluster, sidecars))
    if "scenarios" in parts:
        with run.step("scenarios"):
            for each in scenarios.ANYWHERE + (scenarios.ON_NODES if cluster.nodes else ()):
                if options.scenario in each.__name__:
                    run.try_out(each.__name__, partial(each, cluster))
            for last in scenarios.WITH_RESTART if cluster.nodes else ():
                if options.scenario in last.__name__:
                    again = partial(restart, cluster)
                    run.try_out(last.__name__, partial(last, cluster, again))
    if "parallel" in parts:
        with run.step("External.Storage, parallel"):
            run.suite(suites.parallel(cluster, focus=options.focus))
    if "serial" in parts:
        with run.step("External.Storage, serial"):
            run.suite(suites.serial(cluster))
    if "disruptive" in parts and cluster.nodes:
        with run.step("External.Storage, disruptive"):
            run.suite(suites.disruptive(cluster))


def keep_logs(cluster: Cluster) -> None:
    """Write the logs of the driver's containers, and the events."""
    cluster.logs.mkdir(exist_ok=True)
    with suppress(CommandError):
        for pod in cluster.get("-n", NAMESPACE, "pods")["items"]:
            for container in pod["spec"]["containers"]:
                name = pod["metadata"]["name"], container["name"]
                text = cluster.kubectl("-n", NAMESPACE, "logs", name[0], "-c", name[1])
                (cluster.logs / f"{name[0]}-{name[1]}.log").write_text(text)
        events = cluster.kubectl("get", "events", "-A", "--sort-by=.lastTimestamp")
        (cluster.logs / "events.txt").write_text(events)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it
