"""`fusefs profile`: what it shows of the requests of a mount, and that it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess

from tests.support.mounting import FUSEFS, LIMIT_S, Mounter, fusefs
from tests.support.servers.buckets import Bucket

MIB = 1 << 20


def test_what_a_mount_did_is_counted_until_the_command_is_interrupted(
    bucket: Bucket, mounter: Mounter
) -> None:
    bucket.put("data/large", os.urandom(6 * MIB))
    mount = mounter("--session", "kernel", "--passthrough", "off", "--no-read-only")
    (mount.path / "before").write_bytes(b"x")
    with subprocess.Popen(
        [FUSEFS, "profile", mount.path, "--for", "60s", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "counting for 1 min; Ctrl-C ends it\n"
        (mount.path / "data" / "large").read_bytes()
        assert not (mount.path / "data" / "absent").exists()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    found = json.loads(out)
    interval_s = found["interval_s"]
    assert round(found["read_s"] * interval_s) == 6 * MIB
    assert round(found["opens"]["served"] * interval_s) == 1
    assert found["requests"]["lookup"]["per_s"] > 0
    assert found["requests"]["read"]["within_s"] > 0
    assert round(found["outcomes_s"]["refused"] * interval_s) >= 1
    assert "create" not in found["requests"]
    assert isinstance(found["advice"], list)
    text = fusefs("profile", mount.path, "--for", "0.1s").stdout
    assert text.startswith("requests    0 in 0.")
    assert text.endswith("advice      nothing stands out\n")
