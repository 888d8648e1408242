"""What pyfuse3's session does where the operations are at fault."""

from __future__ import annotations

import errno
import logging
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest

from fusefs.fuse.pyfuse3_session import Pyfuse3Handlers


async def test_a_request_that_meets_a_fault_of_ours_is_eio_and_the_mount_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("so it goes")

    operations: Any = SimpleNamespace(lookup=fail)
    caller: Any = SimpleNamespace(uid=0, gid=0, pid=1)
    with caplog.at_level(logging.ERROR), pytest.raises(pyfuse3.FUSEError) as error:
        await Pyfuse3Handlers(operations).lookup(1, b"name", caller)
    assert error.value.errno == errno.EIO
    assert "so it goes" in caplog.text
