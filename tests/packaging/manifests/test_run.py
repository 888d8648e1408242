"""The DaemonSets' containers as the manifests have them, on this machine and its own root."""

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import grpc
import pytest

from csi.generated import csi_pb2, csi_pb2_grpc
from csi.server import DRIVER_NAME
from tests.support.csi.pods import (
    Container,
    Host,
    free,
    make_mountpoints,
    mountpoints_of,
    overlaid_root,
)
from tests.support.packaging.manifests import MANIFESTS, find, render
from tests.support.servers.buckets import Bucket
from tests.support.servers.s3_server import ACCESS_KEY, SECRET_KEY
from tests.support.survival.keeping import LIMIT_S, needs_fuse, needs_root

pytestmark = [needs_root, needs_fuse]

# The root of an image, where one was built (see test_image.py), in place of this machine's.
IMAGE = os.environ.get("IMAGE")
CONTENT = b"object " * 1000
SOCKET = "/csi/csi.sock"
MOUNTS = f"/var/lib/kubelet/plugins/{DRIVER_NAME}/mounts"
TARGET = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/data/mount"


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    """Run it beside the test, for it may wait for long; its result is put into the list."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    # Not pytest's, which looks through everything below it.
    directory = Path(tempfile.mkdtemp(prefix="pods-"))
    yield directory
    free(directory)
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def pods(directory: Path, shared: Bucket) -> Iterator[dict[str, Container]]:
    """The containers, started: `driver`, `daemons`, and what follows the latter: `next`."""
    documents = render(MANIFESTS)
    sets = {
        "driver": "fusefs-csi-node",
        "daemons": "fusefs-csi-daemons",
        "next": "fusefs-csi-daemons",
    }
    templates = {
        name: find(documents, "DaemonSet", of)["spec"]["template"] for name, of in sets.items()
    }
    mountpoints = mountpoints_of(*templates.values())
    if IMAGE:
        root, program = Path(IMAGE), "/usr/bin/tini -- fusefs-csi"
        make_mountpoints(root, mountpoints)
    else:
        root = overlaid_root(directory, mountpoints)
        program = str(Path(sys.executable).with_name("fusefs-csi"))
    host = Host(directory / "host")
    containers = {
        name: Container(
            root,
            host,
            directory / name,
            template,
            name.replace("next", "daemons"),
            program,
            directory / f"{name}.log",
        )
        for name, template in templates.items()
    }
    containers["driver"].path("/etc/fusefs-csi/stores.toml").write_text(
        f'[stores.here]\nendpoint-url = "{shared.server.endpoint_url}"\n'
        'region = "us-east-1"\naddressing = "path"\n'
    )
    start_daemons(containers["daemons"])
    start_driver(containers)
    yield containers
    for each in containers.values():
        each.kill()


@pytest.fixture
def target(pods: dict[str, Container], shared: Bucket) -> Iterator[Path]:
    """A volume with a file `before`, published; nothing may be left of it afterwards."""
    shared.put("before", CONTENT)
    target = pods["driver"].path(TARGET)
    target.parent.mkdir(parents=True, exist_ok=True)
    publish(pods, shared)
    yield target
    request = csi_pb2.NodeUnpublishVolumeRequest(volume_id="data", target_path=TARGET)
    call(pods, "NodeUnpublishVolume", request)
    assert not target.exists()
    assert not os.listdir(pods["driver"].path(MOUNTS))


def start_daemons(daemons: Container) -> None:
    daemons.start()
    daemons.wait_for("/tmp/ready")


def start_driver(pods: dict[str, Container]) -> None:
    pods["driver"].path(SOCKET).unlink(missing_ok=True)
    pods["driver"].start()
    pods["driver"].wait_for(SOCKET)


def call(pods: dict[str, Container], method: str, request: Any) -> Any:
    with grpc.insecure_channel(f"unix://{pods['driver'].path(SOCKET)}") as channel:
        stub = csi_pb2_grpc.NodeStub(channel)
        return getattr(stub, method)(request, timeout=LIMIT_S, wait_for_ready=True)


def publish(pods: dict[str, Container], bucket: Bucket) -> None:
    mode = csi_pb2.VolumeCapability.AccessMode.MULTI_NODE_MULTI_WRITER
    call(
        pods,
        "NodePublishVolume",
        csi_pb2.NodePublishVolumeRequest(
            volume_id="data",
            target_path=TARGET,
            secrets={"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY},
            volume_context={"store": "here", "bucket": bucket.name},
            volume_capability=csi_pb2.VolumeCapability(
                mount=csi_pb2.VolumeCapability.MountVolume(volume_mount_group="1000"),
                access_mode=csi_pb2.VolumeCapability.AccessMode(mode=mode),
            ),
        ),
    )


def read_on(file: BinaryIO, target: Path) -> tuple[bytes, list[str]]:
    """From a file that is open, and from the directory."""
    file.seek(0)
    return file.read(), os.listdir(target)


def test_a_pod_reads_and_writes_as_its_group(target: Path, shared: Bucket) -> None:
    assert os.stat(target / "before").st_gid == 1000
    (target / "written").write_bytes(b"content")
    answer = shared.client.get_object(Bucket=shared.name, Key="written")
    assert answer["Body"].read() == b"content"
    (target / "written").unlink()


def test_a_volume_outlives_all_daemons_at_once(pods: dict[str, Container], target: Path) -> None:
    file = (target / "before").open("rb")  # closed only at the end, for that may wait, too
    file.read(7)
    pods["daemons"].kill()
    thread, results = in_thread(lambda: read_on(file, target))
    start_daemons(pods["daemons"])
    thread.join(LIMIT_S)
    assert results == [(CONTENT, ["before"])]
    file.close()
    # The keepers are in another PID namespace, where a daemon has no number.
    log = pods["driver"].log.read_text()
    assert "the daemon 0" not in log
    assert "the daemon in the other container serves" in log


def test_a_volume_outlives_a_roll_out_of_both_sets_at_once(
    pods: dict[str, Container], target: Path, shared: Bucket
) -> None:
    with (target / "before").open("rb") as file:
        start_daemons(pods["next"])
        pods["driver"].kill()
        pods["daemons"].kill()
        assert read_on(file, target) == (CONTENT, ["before"])
        start_driver(pods)
        publish(pods, shared)
        assert read_on(file, target) == (CONTENT, ["before"])
