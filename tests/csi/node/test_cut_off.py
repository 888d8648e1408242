"""A driver that is killed in the middle of a call, at each of its steps: the next call goes on."""

from typing import Any

import grpc
import pytest

from tests.support.csi.node import START, Node, until_final
from tests.support.servers.buckets import Bucket
from tests.support.sharing import PATIENCE_S

# The driver, which kills itself when a call comes to the function that CUT_AT names. No call is
# answered before the mount has ended, however busy the machine is.
DYING = f"""
import os, signal, threading
from csi.node import drain
drain.LINGER_S = 600.0
def look(frame, event, _):
    is_call = threading.current_thread().name.startswith("call")
    if is_call and frame.f_code.co_qualname == os.environ["CUT_AT"]:
        os.kill(os.getpid(), signal.SIGKILL)
threading.settrace(look)
{START}
"""
# In the order in which a call comes to them.
PUBLISHING = (
    "CacheDomains.claim",
    "CredentialFiles.store",
    "RecordFiles.write",
    "make_directory",
    "start",
    "Warmups.blocks_publish",
    "bind",
    "Warmups.remove_waiter",
)
UNPUBLISHING = (
    "pop_all",
    "remove_directory",
    "Drains.end",
    "Mounts._processes",
    "Mounts._have_ended",
    "unregister",
    "CredentialFiles.remove",
    "RecordFiles.remove",
)
PAIRS = [
    pytest.param(
        *pair,
        marks=()
        if pair[0] in ("RecordFiles.write", "Warmups.blocks_publish")
        else pytest.mark.storm,
    )
    for pair in zip(PUBLISHING, UNPUBLISHING, strict=True)
]


def cut_off(node: Node, step: str, call: Any, *arguments: Any, **options: Any) -> None:
    """Make a call during which the driver dies at a step, and have the next driver started."""
    node.kill()
    node.command[-1], node.environment["CUT_AT"] = DYING, step
    node.start()
    with pytest.raises(grpc.RpcError):
        call(*arguments, **options)
    assert node.process.wait(PATIENCE_S) == -9, "it came to that step"
    node.command[-1] = START
    node.start()


@pytest.mark.parametrize(("publishing", "unpublishing"), PAIRS)
def test_a_call_that_is_cut_off_is_finished_by_the_next(
    node: Node, data: Bucket, publishing: str, unpublishing: str
) -> None:
    target = node.target("pod")
    volume = {"bucket": data.name, "prefix": "a"}
    cut_off(node, publishing, node.publish, "volume", target, **volume)
    until_final(node.publish, "volume", target, **volume)
    assert (target / "hello").read_bytes() == b"hello"
    assert len(node.mounted()) == 2
    cut_off(node, unpublishing, node.unpublish, "volume", target)
    until_final(node.unpublish, "volume", target)
