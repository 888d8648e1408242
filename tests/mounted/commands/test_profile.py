"""`fusefs profile`: what it shows of the requests of a mount, and that it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.support.mounting import FUSEFS, LIMIT_S, Mount, Mounter, fusefs
from tests.support.servers.buckets import Bucket

MIB = 1 << 20


def start_profile(mount: Mount) -> subprocess.Popen[str]:
    """A command that records already."""
    process = subprocess.Popen(
        [FUSEFS, "profile", mount.path, "--for", "60s", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("recording for 60s")
    return process


def end_profile(process: subprocess.Popen[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Its requests and its summary."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    *requests, summary = [json.loads(line) for line in out.splitlines()]
    return requests, summary


def of(requests: list[dict[str, Any]], operation: str, key: str) -> list[dict[str, Any]]:
    return [one for one in requests if (one["operation"], one["key"]) == (operation, key)]


def test_requests_are_logged_with_where_their_answers_came_from(
    bucket: Bucket, mounter: Mounter
) -> None:
    bucket.put("data/large", os.urandom(6 * MIB))
    bucket.put("data/small", b"x" * 1000)
    mount = mounter("--session", "kernel", "--passthrough", "off")
    process = start_profile(mount)
    refused = fusefs("profile", mount.path, check=False)
    assert refused.stderr == "fusefs: another fusefs profile runs on this mount\n"
    (mount.path / "data" / "large").read_bytes()
    assert not Path(mount.path, "data", "absent").exists()
    for _ in range(2):
        (mount.path / "data" / "small").read_bytes()
    requests, summary = end_profile(process)
    reads = of(requests, "read", "data/large")
    assert sum(one["size"] for one in reads) == 6 * MIB
    # What was fetched ahead of a read is in the cache by then, perhaps all of it.
    assert {one["source"] for one in reads} <= {"s3", "cache"}
    assert [one["size"] for one in of(requests, "open", "data/small")] == [1000, 1000]
    assert of(requests, "lookup", "data/absent")
    assert all(one["seconds"] >= 0 for one in requests)
    assert summary["requests"] == len(requests)
    assert (summary["opens"], summary["opened_files"], summary["reopened_files"]) == (3, 2, 1)
    assert summary["largest_file_bytes"] == 6 * MIB
    assert 1 <= summary["sequential_reads"] <= summary["reads"]
    # Off again, requests are handled as before.
    assert (mount.path / "data" / "small").read_bytes() == b"x" * 1000
    text = fusefs("profile", mount.path, "--for", "0.1s").stdout
    assert "requests    0 in" in text
    assert "advice      nothing stands out" in text


def test_what_is_written_is_logged_and_a_killed_command_leaves_nothing(mounter: Mounter) -> None:
    mount = mounter("--session", "kernel", "--no-read-only")
    first = start_profile(mount)
    (mount.path / "a").write_bytes(b"x" * MIB)
    (mount.path / "a").unlink()
    requests, summary = end_profile(first)
    assert sum(one["size"] for one in of(requests, "write", "a")) == MIB
    assert summary["written_bytes"] == MIB
    killed = start_profile(mount)
    killed.kill()
    killed.communicate(timeout=LIMIT_S)
    (mount.path / "b").write_bytes(b"y")
    assert (mount.path / "b").read_bytes() == b"y"
