"""The workloads of the group "starting": from the request for a mount to a file's first byte.

Values are times and MiB, so less is better. The reader is a process that waits, ready to open, and
gets a message when the mount is there: so a mount that hangs blocks only this process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.bucket import READY
from bench.contenders.csi_node import CsiNode
from bench.session import Sample, Session

MIB = 1024 * 1024
TIMES = 5
# As many as the pods of a job that start on a node at once may have.
AT_ONCE = 20
# So many that their shared memory, which is divided among them, weighs little.
VOLUMES = 5


def mount_first_byte(session: Session) -> Sample:
    """Time the mount's command, with an empty cache."""
    contender = session.contender

    def once(_number: int) -> float:
        contender.stop()
        return _first_byte_ms(session, contender.root, contender.start)

    return _median(once)


def publish_first_byte(session: Session) -> Sample:
    """Time a volume that is new on the node, from kubelet's call on."""
    return _median(lambda number: _publish_ms(session, f"new-{number}", "pod"))


def publish_second_pod(session: Session) -> Sample:
    """Time a volume that another pod of the node uses already, as the same identity."""
    _publish_ms(session, "shared", "first-pod")
    return _median(lambda number: _publish_ms(session, "shared", f"pod-{number}"))


def publish_at_once(session: Session) -> Sample:
    """Time many new volumes that are published at the same time, until all have a byte."""
    node = _node(session)
    node.unpublish_all()
    targets = {
        f"at-once-{number}": node.target(f"at-once-{number}", "pod") for number in range(AT_ONCE)
    }
    seconds = session.seconds_to_first_bytes(
        {
            target / READY: partial(node.publish, volume, target)
            for volume, target in targets.items()
        }
    )
    node.unpublish_all()
    return Sample(max(seconds), {"volumes": AT_ONCE, "seconds": seconds})


def volume_mib(session: Session) -> Sample:
    """Measure the memory of a volume's processes after a read, without the driver's own."""
    node = _node(session)
    node.unpublish_all()
    for number in range(VOLUMES):
        _publish_ms(session, f"volume-{number}", "pod")
    parts = {name: size / VOLUMES / MIB for name, size in node.memory_by_part().items()}
    return Sample(sum(parts.values()), {"volumes": VOLUMES, **parts})


def _node(session: Session) -> CsiNode:
    assert isinstance(session.contender, CsiNode)
    return session.contender


def _publish_ms(session: Session, volume: str, pod: str) -> float:
    node = _node(session)
    target = node.target(volume, pod)
    return _first_byte_ms(session, target, lambda: node.publish(volume, target))


def _first_byte_ms(session: Session, root: Path, begin: Callable[[], None]) -> float:
    return 1000 * session.seconds_to_first_byte(root / READY, begin)


def _median(measure: Callable[[int], float]) -> Sample:
    values = [measure(number) for number in range(TIMES)]
    return Sample(statistics.median(values), {"ms": values})
