"""What kubelet asks of `fusefs-csi node`, over its socket, with real mounts."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from csi.generated import csi_pb2
from tests.support.csi.node import SECRETS, Mode, Node, capability, until_final
from tests.support.csi.publishing import refused
from tests.support.servers.buckets import Bucket
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.s3_server import ACCESS_KEY
from tests.support.waiting import until

Code = grpc.StatusCode
PLACE, ROLE = {"store": "main", "bucket": "bucket"}, "arn:aws:iam::1:role/x"
BLOCK = csi_pb2.VolumeCapability(block={}, access_mode={"mode": Mode.SINGLE_NODE_WRITER})


def of_user(uid: int, script: str, directory: Path) -> None:
    """Run a script as a user with a group of his own, and the pod's beside it."""
    subprocess.run(
        ["sh", "-ec", script], cwd=directory, user=uid, group=uid, extra_groups=[2345], check=True
    )


def test_pods_share_one_mount_until_the_last_of_them_goes(node: Node, data: Bucket) -> None:
    targets = [node.target(f"pod-{number}") for number in range(3)]
    for number, target in enumerate(targets):
        node.publish("shared", target, readonly=number == 1, bucket=data.name, prefix="a")
    assert len(node.roots()) == len(node.daemons()) == 1
    with pytest.raises(OSError, match="Read-only"):
        (targets[1] / "x").write_bytes(b"")
    for target in targets:
        assert (target / "hello").read_bytes() == b"hello"
        node.unpublish("shared", target)
        assert not target.exists()


def test_a_reader_mode_makes_the_mount_itself_read_only(node: Node, data: Bucket) -> None:
    target = node.target("pod")
    node.publish(
        "rox", target, cap=capability(Mode.MULTI_NODE_READER_ONLY), bucket=data.name, prefix="a"
    )
    assert "ro" in node.roots()[0].options.split(",")
    node.unpublish("rox", target)


def test_an_inline_volume_lives_with_its_pods_secret_alone(node: Node, data: Bucket) -> None:
    target = node.target("pod")
    inline = {"csi.storage.k8s.io/ephemeral": "true", "bucket": data.name, "prefix": "a"}
    with refused(Code.INVALID_ARGUMENT, "inline"):
        node.publish("csi-1", target, secrets={}, **inline)
    with refused(Code.INVALID_ARGUMENT, "endpoint"):
        node.publish("csi-1", target, endpoint="http://169.254.169.254", **inline)
    # Kubelet says what it is only as long as the CSIDriver object asks for it.
    with refused(Code.INVALID_ARGUMENT, "inline"):
        node.publish("csi-" + "0a" * 32, target, secrets={}, bucket=data.name)
    node.publish("csi-1", target, **inline)
    assert (target / "hello").read_bytes() == b"hello"
    node.unpublish("csi-1", target)


def test_two_users_of_a_pods_group_write_each_others_files(node: Node, data: Bucket) -> None:
    """Kubernetes' fsGroup: what was there and what is new belongs to the group, which may write."""
    target = node.target("pod")
    group = capability(group="2345")
    node.publish("grouped", target, cap=group, bucket=data.name, prefix="a")
    there = (target / "hello").stat()
    assert (there.st_gid, there.st_mode & 0o777) == (2345, 0o664)
    names = ["new", "new/file", "new/link", "new/program"]
    made = "umask 022; cd new-data; mkdir new; echo -n one > new/file; ln -s file new/link"
    made += "; install -m 700 /dev/null new/program"
    try:
        (target / "new-data").mkdir()
        of_user(1001, made, target)
        shown = [(target / "new-data" / name).lstat() for name in names]
        assert {one.st_gid for one in shown} == {2345}
        assert {one.st_uid for one in shown} == {1001}
        modes = [0o775, 0o664, 0o777, 0o700]  # the last one as install sets it
        assert [one.st_mode & 0o777 for one in shown] == modes
        of_user(1002, "cd new-data/new; echo -n two >> file; echo -n three > other", target)
        assert (target / "new-data/new/file").read_bytes() == b"onetwo"
        stored = data.client.head_object(Bucket=data.name, Key="a/new-data/new/file")
        assert stored["Metadata"]["gid"] == "1001"  # of its maker, as on any mount
        assert int(stored["Metadata"]["mode"]) & 0o777 == 0o644
    finally:
        shutil.rmtree(target / "new-data")
        node.unpublish("grouped", target)


def test_publishing_again_brings_fresh_keys_and_asks_neither_bucket_nor_mount(
    node: Node, data: Bucket, faulty: FaultyS3
) -> None:
    target = node.target("pod")
    volume = {"store": "faulty", "bucket": data.name, "prefix": "a"}
    node.publish("again", target, **volume)
    daemon = node.daemons()[0]
    before = len(faulty.requests())
    os.kill(daemon, signal.SIGSTOP)  # whoever looked at the mount would wait
    try:
        fresh = {"accessKeyId": "NEW", "secretAccessKey": "new-one"}
        node.publish("again", target, timeout_s=20, secrets=fresh, **volume)
        # Neither is a reason to take the pod's volume away, or to read it as the driver.
        for useless in ({"accessKeyId": "only"}, {}):
            node.publish("again", target, secrets=useless, timeout_s=20, **volume)
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert len(faulty.requests()) == before
    files = list((node.state / "credentials").glob("*/keys"))
    assert ["NEW" in file.read_text() for file in files] == [True]
    node.unpublish("again", target)


def test_an_access_mode_that_is_changed_while_pods_run_changes_no_mount(
    node: Node, data: Bucket
) -> None:
    """ReadWriteOnce to ReadWriteOncePod, as Kubernetes documents it."""
    target, other = node.target("pod"), node.target("other-pod")
    volume = {"bucket": data.name, "prefix": "a"}
    before = capability(Mode.SINGLE_NODE_MULTI_WRITER)
    after = volume | {"cap": capability(Mode.SINGLE_NODE_SINGLE_WRITER)}
    node.publish("moded", target, cap=before, **volume)
    node.publish("moded", other, cap=before, **volume)
    fresh = {"accessKeyId": "NEW", "secretAccessKey": "new-one"}
    for _ in range(2):
        node.publish("moded", target, secrets=fresh, **after)
    [file] = (node.state / "credentials").glob("*/keys")
    assert "NEW" in file.read_text()
    node.unpublish("moded", other)
    with refused(Code.FAILED_PRECONDITION, "moded"):
        node.publish("moded", other, **after)
    node.kill_all()
    node.publish("moded", target, **after)
    assert (target / "hello").read_bytes() == b"hello"
    assert len(node.roots()) == 1
    node.unpublish("moded", target)


def test_a_dead_mount_gets_a_new_one_on_top(node: Node, data: Bucket) -> None:
    target = node.target("pod")
    volume = {"bucket": data.name, "prefix": "a"}
    node.publish("dying", target, **volume)
    for deaths in range(1, 3):
        node.kill_all()
        until(lambda: not node.processes(), "they are dead")
        node.publish("dying", target, **volume)
        assert (target / "hello").read_bytes() == b"hello"
        assert len([one for one in node.mounted() if one.mountpoint == target]) == deaths + 1
    assert len(node.roots()) == 1
    node.unpublish("dying", target)


def test_a_publish_that_was_cut_off_is_finished_by_the_next(
    node: Node, data: Bucket, faulty: FaultyS3
) -> None:
    target = node.target("pod")
    volume = {"store": "faulty", "bucket": data.name, "prefix": "a"}
    slow = faulty.add("LIST", stall=True)
    before = len(faulty.requests("LIST"))
    call = node.node.NodePublishVolume.future(node.request("cut", target, **volume))
    until(lambda: len(faulty.requests("LIST")) > before, "the bucket gets a request")
    node.kill()
    call.cancel()
    node.start()
    faulty.remove(slow)
    slow.release()
    until_final(node.publish, "cut", target, **volume)
    assert len(node.roots()) == len(node.daemons()) == 1, "no second mount over the first"
    assert (target / "hello").read_bytes() == b"hello"
    node.unpublish("cut", target)


def test_wrong_keys_are_reported_where_the_pods_events_show_it(node: Node, data: Bucket) -> None:
    wrong = {"accessKeyId": "NOBODY", "secretAccessKey": "x"}
    with refused(Code.UNAUTHENTICATED, f"s3://{data.name}/a/", "NOBODY") as error:
        node.publish("wrong", node.target("pod"), secrets=wrong, bucket=data.name, prefix="a")
    # Kubelet counts equal events, and writes another for each that differs.
    assert "(request" not in error.value.details()
    assert "(request " in node.log.read_text()


def test_a_missing_right_is_reported(node: Node, data: Bucket, faulty: FaultyS3) -> None:
    faulty.add("LIST", code="AccessDenied")
    with refused(Code.PERMISSION_DENIED, "access denied", data.name, ACCESS_KEY):
        node.publish("denied", node.target("pod"), store="faulty", bucket=data.name)


def test_a_missing_bucket_is_reported(node: Node) -> None:
    with refused(Code.INVALID_ARGUMENT, "no such bucket"):
        node.publish("none", node.target("pod"), bucket="there-is-none")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"volume_id": ""}, "volume_id"),
        ({"target_path": ""}, "target_path"),
        ({"target_path": "relative/path"}, "target_path"),
        ({"target_path": "/etc/../etc/x"}, "target_path"),
        ({"target_path": "/etc/mount"}, "target_path"),
        ({"volume_capability": None}, "volume_capability"),
        ({"volume_capability": BLOCK}, "block"),
        ({"volume_capability": csi_pb2.VolumeCapability(mount={})}, "access mode"),
        ({"volume_capability": capability(group="staff")}, "volume_mount_group"),
        ({"volume_capability": capability(group="9" * 5000)}, "volume_mount_group"),
        ({"volume_capability": capability(flags=("suid",))}, "suid"),
        ({"volume_context": {"store": "main"}}, "bucket"),
        ({"volume_context": {"store": "other", "bucket": "bucket"}}, "store"),
        ({"volume_context": {**PLACE, "prefix": "a/../b"}}, "prefix"),
        ({"volume_context": {**PLACE, "cacheDir": "/etc"}}, "cacheDir"),
        ({"secrets": {"accessKeyId": "x"}}, "secret_access_key"),
        ({"secrets": {}, "volume_context": {**PLACE, "roleArn": ROLE}}, "sts-url"),
    ],
)
def test_bad_input_is_refused_by_name(node: Node, change: dict[str, Any], word: str) -> None:
    fields: dict[str, Any] = {
        "volume_id": "bad",
        "target_path": str(node.target("pod")),
        "secrets": SECRETS,
        "volume_capability": capability(),
        "volume_context": PLACE,
    }
    request = csi_pb2.NodePublishVolumeRequest(**(fields | change))
    with refused(Code.INVALID_ARGUMENT, word):
        node.node.NodePublishVolume(request, timeout=30)


def test_a_published_path_takes_nothing_else_nor_do_paths_below_it(
    node: Node, data: Bucket
) -> None:
    target = node.target("pod")
    node.publish("one", target, bucket=data.name)
    with refused(Code.INVALID_ARGUMENT, "target_path"):
        node.publish("inner", target / "a" / "mount", bucket=data.name)
    with refused(Code.NOT_FOUND, "target_path"):
        node.unpublish("inner", target / "a" / "mount")
    for change in ({"readonly": True}, {"cap": capability(group="5")}, {"prefix": "b"}):
        with refused(Code.ALREADY_EXISTS):
            node.publish("one", target, bucket=data.name, **change)
    with refused(Code.ALREADY_EXISTS):
        node.publish("two", target, bucket=data.name)
    node.publish("one", target, bucket=data.name, cap=capability(flags=("uid=5",)))
    node.unpublish("two", target)
    assert (target / "a/hello").read_bytes() == b"hello"
    node.unpublish("one", target)


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("SINGLE_NODE_WRITER", Code.FAILED_PRECONDITION),
        ("SINGLE_NODE_SINGLE_WRITER", Code.FAILED_PRECONDITION),
        ("SINGLE_NODE_MULTI_WRITER", None),
    ],
)
def test_how_many_paths_a_mode_allows(
    node: Node, data: Bucket, mode: str, code: grpc.StatusCode | None
) -> None:
    first, second = node.target("pod-1"), node.target("pod-2")
    cap = capability(Mode.Mode.Value(mode))
    node.publish("counted", first, cap=cap, bucket=data.name)
    with refused(code, "counted") if code else contextlib.nullcontext():
        node.publish("counted", second, cap=cap, bucket=data.name)
    node.publish("counted", first, cap=cap, bucket=data.name)
    for target in (first, second):
        node.unpublish("counted", target)


@pytest.mark.parametrize("missing", ["volume_id", "path"])
def test_calls_without_a_field_are_refused(node: Node, missing: str) -> None:
    path = "" if missing == "path" else str(node.target("pod"))
    volume = "" if missing == "volume_id" else "volume"
    request = csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume, target_path=path)
    with refused(Code.INVALID_ARGUMENT, missing):
        node.node.NodeUnpublishVolume(request, timeout=10)


@pytest.mark.parametrize(
    "path",
    ["relative/path", "/", "/some/path", "/pods/../pods/x", "//pods", "/" + "x" * 5000, "/a\nb"],
)
def test_nothing_is_published_where_no_volume_can_be(node: Node, path: str) -> None:
    with refused(Code.NOT_FOUND, "target_path"):
        node.unpublish("volume", path)


def test_what_is_not_published_is_unpublished(node: Node) -> None:
    """Kubelet repeats the call until it is answered with OK."""
    for path in (node.target("pod"), node.pods / "no" / "such" / "pod", node.pods / "x"):
        node.unpublish("volume", path)


def test_a_node_tells_its_name_and_what_it_can(node: Node) -> None:
    info = node.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=10)
    assert info.node_id == "node-1"
    assert not info.HasField("accessible_topology")
    answer = node.node.NodeGetCapabilities(csi_pb2.NodeGetCapabilitiesRequest(), timeout=10)
    types = csi_pb2.NodeServiceCapability.RPC
    assert {one.rpc.type for one in answer.capabilities} == {
        types.VOLUME_MOUNT_GROUP,
        types.SINGLE_NODE_MULTI_WRITER,
    }
    with refused(Code.UNIMPLEMENTED):
        node.node.NodeStageVolume(csi_pb2.NodeStageVolumeRequest(volume_id="x"), timeout=10)
