"""What a real container sees of a volume, through the deaths of what serves it."""

import json
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.csi.container import container_reading
from tests.support.csi.daemons import DaemonsProcess, daemons_of
from tests.support.csi.node import Node, capability
from tests.support.csi.node import node as node
from tests.support.csi.pod import USER, Pod
from tests.support.mounting import OLD_KERNEL
from tests.support.servers.buckets import Bucket
from tests.support.sharing import PATIENCE_S
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(shutil.which("runc") is None, reason="there is no runc")

# Reads all the time: a file that it has open, the same opened anew, and the directory.
# Prints how often, and what went wrong, for each line of its input.
ALWAYS_READING = """
import json, os, sys, threading, time
path = sys.argv[1]
held = open(path, "rb")
report = {"reads": 0, "wrong": []}
def read_on():
    while True:
        try:
            seen = [os.pread(held.fileno(), 99, 0), open(path, "rb").read()]
            if seen != [b"hello"] * 2 or os.listdir(os.path.dirname(path)) != ["hello"]:
                report["wrong"].append(repr(seen))
        except OSError as error:
            report["wrong"].append(str(error))
        report["reads"] += 1
        time.sleep(0.002)  # not a processor of its own
print("ready", flush=True)
threading.Thread(target=read_on, daemon=True).start()
for _ in sys.stdin:
    print(json.dumps({**report, "wrong": report["wrong"][:3]}), flush=True)
"""

WRITER = """
import sys
path = sys.argv[1]
print("ready", flush=True)
for _ in sys.stdin:
    try:
        with open(path, "w") as file:
            file.write("from the container")
        print(open(path).read(), flush=True)
    except OSError as error:
        print(error, flush=True)
"""

# Tells the modes of what is there, and as whom a program of the volume runs.
LOOKER = """
import json, os, subprocess, sys
folder, program = os.path.split(sys.argv[1])
print("ready", flush=True)
for _ in sys.stdin:
    found = {name: os.lstat(f"{folder}/{name}").st_mode for name in os.listdir(folder)}
    done = subprocess.run([sys.argv[1], "-u"], capture_output=True, text=True)
    print(json.dumps({"modes": found, "user": done.stdout + done.stderr}), flush=True)
"""


FLAGS = ("--daemons=there",)


@pytest.fixture
def daemons(node: Node) -> Iterator[DaemonsProcess]:
    with daemons_of(node, "daemons") as daemons:
        yield daemons


class Readers:
    """Two containers that always read, of which one may also write."""

    def __init__(self, pods: list[Pod]) -> None:
        self._pods = pods
        self.go_on()

    def go_on(self) -> None:
        """Both read what is there, and have never seen anything else."""
        for pod in self._pods:
            before = self._report(pod)
            # One read may have begun before.
            until(lambda pod=pod, before=before: self._report(pod) > before + 1, "it reads on")

    def _report(self, pod: Pod) -> int:
        report = json.loads(pod.read())
        assert report["wrong"] == []
        return int(report["reads"])


def test_containers_always_read_whatever_dies_or_is_replaced(
    node: Node, data: Bucket, daemons: DaemonsProcess
) -> None:
    target = node.target("pod")
    volume = {"bucket": data.name, "prefix": "a", "metadataTtl": "0s"}
    node.publish("volume", target, **volume)
    with ExitStack() as pods_of_daemons:
        with (
            container_reading(node, target, "hello", code=ALWAYS_READING) as writing,
            container_reading(node, target, "hello", code=ALWAYS_READING, read_only=True) as pod,
        ):
            readers = Readers([writing, pod])
            node.kill()
            node.start("--daemons=there")
            readers.go_on()
            node.kill_all("fusefs.daemon")
            readers.go_on()
            node.kill_all("keeper")
            readers.go_on()
            node.kill()
            node.kill_all("keeper")
            readers.go_on()
            node.start("--daemons=there")
            node.publish("volume", target, **volume)
            readers.go_on()
            second = pods_of_daemons.enter_context(daemons_of(node, "second"))
            daemons.process.terminate()
            assert daemons.process.wait(PATIENCE_S) == 0
            readers.go_on()
            second.kill()
            pods_of_daemons.enter_context(daemons_of(node, "third"))
            readers.go_on()
        node.unpublish("volume", target)


@pytest.fixture
def old_kernel(running: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{running.environment['PYTHONPATH']}:{OLD_KERNEL['PYTHONPATH']}"
    monkeypatch.setitem(running.environment, "PYTHONPATH", path)


@pytest.mark.usefixtures("old_kernel")
def test_containers_on_an_old_kernel_read_on_while_daemons_are_rolled_out(
    node: Node, data: Bucket, daemons: DaemonsProcess
) -> None:
    target = node.target("pod")
    node.publish(
        "volume", target, bucket=data.name, prefix="a", metadataTtl="0s", passthrough="off"
    )
    last = daemons
    with ExitStack() as stack:
        with container_reading(node, target, "hello", code=ALWAYS_READING) as pod:
            readers = Readers([pod])
            for name in ("second", "third"):
                following = stack.enter_context(daemons_of(node, name))
                last.process.terminate()
                assert last.process.wait(PATIENCE_S) == 0
                last = following
                readers.go_on()
            # The driver's own container is replaced as well.
            node.kill()
            node.start("--daemons=there")
            readers.go_on()
        node.unpublish("volume", target)


@pytest.mark.usefixtures("daemons")
@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_container_of_an_ordinary_user_writes_where_it_may(
    node: Node, data: Bucket, is_read_only: bool
) -> None:
    target = node.target("pod")
    node.publish(
        "volume", target, cap=capability(flags=(f"uid={USER}",)), bucket=data.name, prefix="a"
    )
    with container_reading(node, target, "new", read_only=is_read_only, code=WRITER) as pod:
        output = pod.read()
        assert output == "from the container" if not is_read_only else "Read-only" in output
    node.unpublish("volume", target)
    data.delete("a/new")


@pytest.mark.usefixtures("daemons")
@pytest.mark.parametrize("is_read_only", [False, True])
def test_nothing_in_a_bucket_is_setuid_or_a_device_in_a_container(
    node: Node, data: Bucket, is_read_only: bool
) -> None:
    """Also where the runtime mounts it anew for `readOnly`, and drops nosuid and nodev."""
    kinds = {"device": stat.S_IFBLK, "fifo": stat.S_IFIFO, "folder": stat.S_IFDIR}
    for name, kind in kinds.items():
        data.put(f"odd/{name}", b"x", Metadata={"mode": str(kind | 0o6600), "rdev": "2049"})
    program = {"mode": str(stat.S_IFREG | 0o6755), "uid": "0", "gid": "0"}
    data.put("odd/id", Path("/usr/bin/id").read_bytes(), Metadata=program)
    target = node.target("pod")
    node.publish("volume", target, bucket=data.name, prefix="odd")
    with container_reading(
        node, target, "id", code=LOOKER, gains_rights=True, read_only=is_read_only
    ) as pod:
        answer = json.loads(pod.read())
    node.unpublish("volume", target)
    assert answer["user"] == f"{USER}\n"
    plain = dict.fromkeys(kinds, stat.S_IFREG | 0o600)
    assert answer["modes"] == {"id": stat.S_IFREG | 0o755, **plain}
