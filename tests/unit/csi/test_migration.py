"""When the daemons of a node count as moved."""

from __future__ import annotations

import socket
from pathlib import Path

from csi.daemons.migration import Moving
from fusefs.keeper import supervisor_protocol


def test_a_supervisor_that_is_slow_still_has_its_daemons(tmp_path: Path) -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.settimeout(0.01)
        moving = Moving(ours, tmp_path, 1)
        with its:
            assert moving._left() == 1
            for count in (2, 0):
                its.send(supervisor_protocol.pack(supervisor_protocol.COUNTED, a=count))
                assert moving._left() == count
        assert moving._left() == 0
