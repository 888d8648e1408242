"""Which process the kernel ends first where memory is short."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusefs.linux import processes


def oom_score_adjustment() -> int:
    """That of a process that yields memory."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            processes.yield_memory()
            os.write(writer, Path("/proc/self/oom_score_adj").read_bytes())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as answer:
        return int(answer.read())


@pytest.mark.parametrize(
    ("own", "group", "yields"),
    [
        ("0::/pods/pod/container", "pods/pod/container", False),
        ("0::/pods/pod/container", "pods/pod", False),
        ("0::/", ".", False),  # a container with a namespace of its own
        ("0::/pods/pod", "pods/pod/container", True),
        ("4:memory:/pods\n1:cpu:/", "pods", True),
        ("", ".", False),
        (None, ".", True),
    ],
)
def test_a_process_that_takes_its_whole_group_along_yields_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, group: str, yields: bool
) -> None:
    (tmp_path / "groups" / group).mkdir(parents=True)
    (tmp_path / "groups" / group / "memory.oom.group").write_text("1\n")
    if own is not None:
        (tmp_path / "cgroup").write_text(f"1:name=systemd:/\n{own}\n")
    monkeypatch.setattr(processes, "CGROUP_FILE", str(tmp_path / "cgroup"))
    monkeypatch.setattr(processes, "CGROUPS", str(tmp_path / "groups"))
    usual = int(Path("/proc/self/oom_score_adj").read_text())
    assert oom_score_adjustment() == (500 if yields else usual)
