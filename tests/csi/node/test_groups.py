"""Pods of one node with different fsGroups: one mount, which shows each its own group."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from csi.node import bind_mount
from fusefs.launch.mount_requests import daemon_request
from fusefs.launch.registry import RUNTIME_VARIABLE
from tests.support.csi.node import Node, capability, running_node
from tests.support.csi.publishing import refused
from tests.support.mounting import OLD_KERNEL
from tests.support.servers.buckets import Bucket
from tests.support.servers.s3_server import S3Server
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

Code = grpc.StatusCode
Shell = Callable[[str], str]
GROUPS = (2001, 2002)
DENIED = "Permission denied"


def shell(directory: Path, user: int, group: int, *, own: int | None = None) -> Shell:
    """Run scripts in a directory as a user of a pod's group; they return what they print.

    `own` is the process' own group, the user's number if it is not given.
    """

    def run(script: str) -> str:
        command = ["sh", "-c", f"umask 022; {script}"]
        options = {"user": user, "group": own or user, "extra_groups": [group]}
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, **options)  # type: ignore[call-overload]
        return str(done.stdout + done.stderr)

    return run


def publish(node: Node, data: Bucket, pod: str, group: int | None) -> Path:
    target = node.target(pod)
    cap = capability(group="" if group is None else str(group))
    node.publish("grouped", target, cap=cap, bucket=data.name, prefix="shared")
    return target


@pytest.fixture
def folders(node: Node, data: Bucket) -> Iterator[tuple[Path, Path]]:
    """One folder of a volume as the pods of two groups see it."""
    targets = [publish(node, data, f"pod-{group}", group) for group in GROUPS]
    assert len(node.roots()) == 1
    (targets[0] / "folder").mkdir()
    try:
        yield targets[0] / "folder", targets[1] / "folder"
    finally:
        shutil.rmtree(targets[0] / "folder")
        for target in targets:
            node.unpublish("grouped", target)


@pytest.fixture
def shells(folders: tuple[Path, Path]) -> tuple[Shell, Shell]:
    first, second = folders
    return shell(first, 1001, GROUPS[0]), shell(second, 1002, GROUPS[1])


def test_pods_of_two_groups_see_each_others_changes_at_once(
    folders: tuple[Path, Path], shells: tuple[Shell, Shell]
) -> None:
    assert [folder.stat().st_gid for folder in folders] == [*GROUPS]
    first, second = shells
    for one, other in ((first, second), (second, first)):
        changes_are_seen(one, other)
        files_are_replaced(one, other)
        names_are_changed(one, other)
        modes_are_obeyed(one, other)
        assert one("rm -r *") == other("ls") == ""


def changes_are_seen(one: Shell, other: Shell) -> None:
    """Writes, appends and edits in turn, each at once, where both have read the file."""
    one("echo one > f")
    assert other("cat f; echo two >> f; cat f") == "one\none\ntwo\n"
    assert one("echo three >> f; cat f") == "one\ntwo\nthree\n"
    other("printf TWO | dd of=f bs=1 seek=4 conv=notrunc 2> /dev/null")
    one("printf ONE | dd of=f bs=1 conv=notrunc 2> /dev/null")
    assert one("cat f") == other("cat f") == "ONE\nTWO\nthree\n"
    other("echo anew > f")
    assert one("echo more >> f; cat f") == other("cat f") == "anew\nmore\n"


def files_are_replaced(one: Shell, other: Shell) -> None:
    one("echo one > g")
    assert other("cat g; rm g; echo two > g") == "one\n"
    assert one("echo three >> g; cat g") == other("cat g") == "two\nthree\n"
    one("echo four > new; mv new g")
    assert other("echo five >> g; cat g") == one("cat g") == "four\nfive\n"


def names_are_changed(one: Shell, other: Shell) -> None:
    one("echo one > h; echo i > i")
    assert other("cat h i") == "one\ni\n"
    one("echo two >> h; mv h h2; rm i")
    assert other("cat h2; echo three >> h2; echo new > h; cat h") == "one\ntwo\nnew\n"
    assert one("cat h h2; cat i 2> /dev/null") == "new\none\ntwo\nthree\n"


def modes_are_obeyed(one: Shell, other: Shell) -> None:
    """What is its owner's alone is refused at once, in a file that was open to both before."""
    one("echo one > own")
    assert other("cat own; echo two >> own") == "one\n"
    one("chmod 600 own")
    assert DENIED in other("echo three >> own")
    assert DENIED in other("cat own")
    one("chmod 640 own")
    assert other("echo three >> own; cat own") == "one\ntwo\nthree\n"
    # A new file of one's alone, under a name that the other one knows as another file's.
    one("rm own; umask 077; echo mine > own")
    assert DENIED in other("echo more >> own")
    assert one("cat own") == "mine\n"
    assert "Operation not permitted" in other("chmod 666 own")
    one("mkdir -m 700 closed; touch closed/f")
    assert DENIED in other("ls closed")
    assert DENIED in other("touch closed/g")


def test_what_a_pod_makes_belongs_to_its_group_and_is_its_users(
    folders: tuple[Path, Path], shells: tuple[Shell, Shell], data: Bucket
) -> None:
    first, second = shells
    second("umask 027; touch f; mkdir d; ln -s f l; mkfifo p 2> /dev/null; install -m 4755 f s")
    second("mkdir -m 2770 setgid; touch setgid/f")
    for folder, group in zip(folders, GROUPS, strict=True):
        shown = {path: path.lstat() for path in folder.rglob("*")}
        assert {one.st_gid for one in shown.values()} == {group}
        assert {one.st_uid for one in shown.values()} == {1002}
        modes = {path.name: f"{one.st_mode & 0o7777:o}" for path, one in shown.items()}
        assert (modes["d"], modes["l"]) == ("770", "777")
    assert "660" in second("stat -c %a f")
    metadata = data.client.head_object(Bucket=data.name, Key="shared/folder/f")["Metadata"]
    assert (metadata["uid"], metadata["gid"]) == ("1002", "1002")
    # A group's number in the second view is the first one's in the mount, and in the object.
    shell(folders[1], 1002, 2002, own=2002)("touch own")
    metadata = data.client.head_object(Bucket=data.name, Key="shared/folder/own")["Metadata"]
    assert (metadata["uid"], metadata["gid"]) == ("1002", "2001")
    # Its owner may give it to a group of the pod's, which it has already; root to anybody.
    assert second("chgrp 2002 f; stat -c %g f") == "2002\n"
    assert "not permitted" in second("chgrp 77 f")
    os.chown(folders[1] / "f", 1001, 77)
    assert first("stat -c '%u %g' f; echo mine > f") == "1001 2001\n"
    assert second("stat -c '%u %g' f; cat f") == "1001 2002\nmine\n"


def test_reads_of_either_group_bypass_the_daemon(
    node: Node, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNTIME_VARIABLE, str(node.state / "fusefs"))
    root = node.roots()[0].mountpoint

    def opens() -> int:
        status = daemon_request(root, {"command": "status"}, PATIENCE_S)
        assert status["passthrough"]["on"], status["passthrough"]["why"]
        return int(status["cache"]["passthrough_opens"])

    content = os.urandom(3 << 20)
    (folders[1] / "big").write_bytes(content)
    for folder in folders:
        before = opens()
        assert (folder / "big").read_bytes() == content
        assert opens() == before + 1


def test_groups_come_and_go_in_any_order(node: Node, data: Bucket) -> None:
    """The mount keeps the group of its first pod, which may be gone, and its files are not lost."""

    def are_right(*groups: int) -> bool:
        [root] = node.roots()
        pods = [one.mountpoint for one in node.mounted() if one.mountpoint != root.mountpoint]
        assert sorted(pods) == sorted(node.target(f"pod-{group}") for group in groups)
        return all((node.target(f"pod-{one}") / "f").stat().st_gid == one for one in groups)

    (publish(node, data, "pod-7", 7) / "f").write_text("7")
    try:
        for group in (0, 2002):
            publish(node, data, f"pod-{group}", group)
        assert are_right(7, 0, 2002)
        node.unpublish("grouped", node.target("pod-7"))
        assert are_right(0, 2002)
        for group in (2**32 - 2, 8):
            publish(node, data, f"pod-{group}", group)
        node.kill()
        node.start()
        for group in (0, 8, 2**32 - 2, 2002, 7):
            publish(node, data, f"pod-{group}", group)
            assert (node.target(f"pod-{group}") / "f").read_text() == "7"
        assert are_right(0, 7, 8, 2002, 2**32 - 2)
        with refused(Code.ALREADY_EXISTS):
            publish(node, data, "pod-7", 8)
        with refused(Code.ALREADY_EXISTS):
            publish(node, data, "pod-8", 7)
    finally:
        (node.target("pod-2002") / "f").unlink()
        for group in (0, 7, 8, 2002, 2**32 - 2):
            node.unpublish("grouped", node.target(f"pod-{group}"))


def test_a_mount_that_is_made_anew_shows_each_pod_its_group(node: Node, data: Bucket) -> None:
    for _ in range(2):
        targets = {group: publish(node, data, f"pod-{group}", group) for group in GROUPS}
        assert {group: target.stat().st_gid for group, target in targets.items()} == {
            group: group for group in GROUPS
        }
        node.kill_all()
    for target in targets.values():
        node.unpublish("grouped", target)


def test_a_sub_path_and_a_mount_without_a_group(node: Node, data: Bucket, tmp_path: Path) -> None:
    """Kubelet binds a subPath from the pod's path; who has no fsGroup has a mount of their own."""
    data.put("shared/sub/file", b"", Metadata={"gid": "5", "mode": str(0o100644)})
    targets = [publish(node, data, f"pod-{group}", group) for group in (*GROUPS, None)]
    try:
        assert len(node.roots()) == 2
        bind_mount.bind(targets[1] / "sub", tmp_path, is_read_only=True)
        shown = [path / "file" for path in (*(one / "sub" for one in targets), tmp_path)]
        assert [file.stat().st_gid for file in shown] == [2001, 2002, 5, 2002]
    finally:
        bind_mount.pop_all(tmp_path)
        for target in targets:
            node.unpublish("grouped", target)
        data.delete("shared/sub/file")


# It makes no user namespace, as where /proc/sys/user/max_user_namespaces is 0.
UNSHARE = """#!/bin/sh
case "$*" in *--user*) echo "unshare: No space left on device" >&2; exit 1;; esac
exec /usr/bin/unshare "$@"
"""


@pytest.mark.parametrize("lacking", ["Invalid argument", "No space left"])
def test_a_second_group_is_refused_where_the_node_cannot_show_it(
    s3: S3Server, data: Bucket, tmp_path: Path, lacking: str
) -> None:
    """Before Linux 6.12, and where there are no user namespaces."""
    with running_node(main=s3.endpoint_url, is_started=False) as node:
        if lacking == "Invalid argument":
            node.environment["PYTHONPATH"] += f":{OLD_KERNEL['PYTHONPATH']}"
        else:
            command = tmp_path / "unshare"
            command.write_text(UNSHARE)
            command.chmod(0o755)
            node.environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        node.start()
        publish(node, data, "pod-1", 2001)
        [record] = (node.state / "mounts").iterdir()
        record.write_text(record.read_text().replace('"drain_began": 0', '"drain_began": 1'))
        for _ in range(2):
            with refused(Code.FAILED_PRECONDITION, "fsGroup 2001", "fsGroup 2002", lacking):
                publish(node, data, "pod-2", 2002)
        assert '"drain_began": 1' in record.read_text()  # no pod has come
        assert not node.target("pod-2").exists()
        publish(node, data, "pod-3", 2001)
        for pod in ("pod-1", "pod-3"):
            node.unpublish("grouped", node.target(pod))
        assert publish(node, data, "pod-2", 2002).stat().st_gid == 2002
        node.unpublish("grouped", node.target("pod-2"))
        until(lambda: not node.leftovers(), "nothing is left")
