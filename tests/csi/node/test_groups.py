"""Pods of one node with different groups: a mount each, which see each other as nodes do."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.csi.node import Node, capability
from tests.support.servers.buckets import Bucket

Shell = Callable[[str], str]


def shell(directory: Path, user: int, group: int) -> Shell:
    """Run scripts in a directory as a user of a pod's group; they return what they print."""

    def run(script: str) -> str:
        command = ["sh", "-c", f"umask 022; {script}"]
        options = {"user": user, "group": user, "extra_groups": [group]}
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, **options)  # type: ignore[call-overload]
        return str(done.stdout + done.stderr)

    return run


def test_pods_of_two_groups_lose_nothing_of_each_other(node: Node, data: Bucket) -> None:
    """What one has closed the other one sees as if it were on another node."""
    targets = node.target("pod-a"), node.target("pod-b")
    for target, group in zip(targets, ("2001", "2002"), strict=True):
        cap = capability(group=group)
        node.publish("grouped", target, cap=cap, bucket=data.name, prefix="shared")
    assert len(node.roots()) == 2
    folder = targets[0] / "folder"
    folder.mkdir()
    assert [(target / "folder").stat().st_gid for target in targets] == [2001, 2002]
    first = shell(folder, 1001, 2001)
    second = shell(targets[1] / "folder", 1002, 2002)
    try:
        for one, other in ((first, second), (second, first)):
            changes_are_seen(one, other)
            files_are_replaced(one, other)
            names_are_changed(one, other)
            assert one("rm -r *") == other("ls") == ""
        # A file of the second alone, whose name the first one has known as another file's.
        first("echo old > own; cat own")
        second("rm own; umask 077; echo own > own")
        first("echo more >> own")
        own = data.client.head_object(Bucket=data.name, Key="shared/folder/own")
        assert own["Metadata"]["uid"] == "1002"
        assert int(own["Metadata"]["mode"]) & 0o777 == 0o600
        assert second("cat own") == "own\nmore\n"
    finally:
        shutil.rmtree(targets[1] / "folder")
        for target in targets:
            node.unpublish("grouped", target)


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
