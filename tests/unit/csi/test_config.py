"""A node's configuration."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from csi.node import config
from tests.support.waiting import until


def test_a_second_driver_of_a_node_waits_for_the_end_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = os.open(tmp_path / config.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(first, fcntl.LOCK_EX)
    second = threading.Thread(target=config.be_the_only_driver, args=(tmp_path,), daemon=True)
    second.start()
    until(lambda: "another driver serves this node" in caplog.text)
    assert second.is_alive()
    os.close(first)
    second.join(30)
    assert not second.is_alive()
