"""What an unpublish does with files that are not in the bucket yet."""

import os
import signal
import time

import grpc
import pytest

from csi.generated import csi_pb2
from tests.support.csi.node import Node, capability, until_final
from tests.support.csi.publishing import refused
from tests.support.csi.rights import allow
from tests.support.servers.buckets import Bucket, keys, stored
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

Code = grpc.StatusCode


def test_a_pod_that_comes_does_not_wait_for_the_uploads_of_one_that_goes(
    node: Node, data: Bucket, faulty: FaultyS3
) -> None:
    target, other = node.target("pod"), node.target("other-pod")
    volume = {"store": "faulty", "bucket": data.name, "prefix": "a", "retryTime": "1s"}
    node.publish("handed-on", target, **volume)
    fault = faulty.add("PUT", code="InternalError")
    with pytest.raises(OSError), (target / "late").open("wb") as file:  # noqa: PT011
        file.write(b"late")
    going = node.node.NodeUnpublishVolume.future(
        csi_pb2.NodeUnpublishVolumeRequest(volume_id="handed-on", target_path=str(target)),
        timeout=PATIENCE_S,
    )
    begun = "NodeUnpublishVolume handed-on begins"
    until(lambda: begun in node.log.read_text(), "it goes")
    time.sleep(1)  # it waits, with the claim or without
    node.publish("handed-on", other, **volume)
    going.result()  # the mount is not to end now
    assert node.log.read_text().count("NodeUnpublishVolume handed-on OK") == 1
    faulty.remove(fault)
    node.unpublish("handed-on", other)
    assert stored(data, "a/late") == b"late"
    data.delete("a/late")


def test_what_a_dead_mount_or_one_without_time_could_not_upload_is_uploaded_by_the_next(
    node: Node, data: Bucket, faulty: FaultyS3, s3: S3Server
) -> None:
    target, other = node.target("pod"), node.target("other-pod")
    volume = {"store": "faulty", "bucket": data.name, "prefix": "a", "retryTime": "1s"}
    volume |= {"drainTimeout": "2s", "cacheDomain": "all"}
    node.publish("given-up", target, **volume)
    fault = faulty.add("PUT", code="InternalError")
    with pytest.raises(OSError), (target / "kept").open("wb") as file:  # noqa: PT011
        file.write(b"kept")
    with refused(Code.ABORTED, "kept", "1 files"):
        node.unpublish("given-up", target, timeout_s=3.5)
    assert target.exists()
    node.publish("given-up", other, **volume)
    node.unpublish("given-up", target)
    time.sleep(2)
    with refused(Code.ABORTED, "kept"):  # it was used meanwhile, and has all its time again
        node.unpublish("given-up", other, timeout_s=3.5)
    until_final(node.unpublish, "given-up", other)
    until(lambda: not node.leftovers(), "nothing is left")
    assert "given up: 1 files" in node.log.read_text()
    node.publish("given-up", target, **volume)
    node.kill_all()
    faulty.add("LIST", code="AccessDenied", times=1)
    with refused(Code.PERMISSION_DENIED):
        node.publish("given-up", target, **volume)
    # Its options do not matter, neither where the dead mount is bound still nor later.
    node.publish("given-up", target, cap=capability(flags=("metadata-ttl=5m",)), **volume)
    assert (target / "kept").read_bytes() == b"kept"
    node.publish("given-up", other, **volume)
    with pytest.raises(OSError), (other / "too").open("wb") as file:  # noqa: PT011
        file.write(b"from a mount with other options beside it")
    node.kill_all()
    node.unpublish("given-up", target)
    node.unpublish("given-up", other)
    assert node.log.read_text().count("has no daemon; not in the bucket yet: a/kept") == 2
    faulty.remove(fault)
    node.publish("given-up", target, secrets=allow(s3, "other", data.name, "a/"), **volume)
    assert not (target / "kept").exists(), "another identity's"
    node.unpublish("given-up", target)
    assert "a/kept" not in keys(data)
    node.publish("given-up", target, **volume)
    assert "from a mount" in (target / "too").read_text()
    node.unpublish("given-up", target)
    node.publish("given-up", target, metadataTtl="1m", **volume)
    assert (target / "kept").read_bytes() == b"kept"
    until(lambda: {"a/kept", "a/too"} <= set(keys(data)), "both are in the bucket")
    node.unpublish("given-up", target)
    for name in ("kept", "too"):
        data.delete(f"a/{name}")


def test_a_mount_whose_daemon_hangs_ends_when_its_time_is_over(node: Node, data: Bucket) -> None:
    target = node.target("pod")
    node.publish("hanging", target, bucket=data.name, prefix="a", drainTimeout="1s")
    os.kill(node.daemons()[0], signal.SIGSTOP)
    with refused(Code.ABORTED, "does not report"):
        node.unpublish("hanging", target, timeout_s=3.5)
    until_final(node.unpublish, "hanging", target, timeout_s=10)
    until(lambda: not node.leftovers(), "what was killed has gone")
