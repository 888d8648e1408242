"""Records of staged files, as several programs have them written."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from fusefs.posix.write import staging_record


def test_two_programs_may_sync_one_file_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=10)
    monkeypatch.setattr(os, "fsync", lambda _fd: both.wait())
    write = partial(staging_record.write, str(tmp_path / "16"), b"record", is_safe=True)
    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(write) for _ in range(2)]:
            done.result()
    assert os.listdir(tmp_path) == ["16.json"]
