"""Checkpoints that were saved are saved, whoever is killed meanwhile."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Bucket
from tests.support.mounting import Mount
from tests.support.surviving import LIMIT_S, keeper_status, serving_pid

ROUNDS = int(os.environ.get("SURVIVAL_ROUNDS", "12"))
PROGRAM = Path(__file__).parent / "support" / "checkpointer.py"


def test_checkpoints_are_saved_while_daemons_and_keepers_are_killed(
    mounter: Callable[..., Mount], bucket: Bucket
) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    mount = mounter("--session", "kernel", "--no-read-only")
    programs = [
        subprocess.Popen(
            [sys.executable, PROGRAM, mount.path / f"run-{seed}", str(seed)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for seed in range(2)
    ]  # fmt: skip
    dice = random.Random(11)
    victims = itertools.cycle(("daemon", "daemon", "daemon", "pid"))
    try:
        for _ in range(ROUNDS):
            time.sleep(dice.uniform(0.3, 0.9))
            pid = keeper_status(mount)[next(victims)]
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        serving_pid(mount)
        expected = {}
        for seed, program in enumerate(programs):
            out, err = program.communicate(timeout=2 * LIMIT_S)
            assert program.returncode == 0, err
            expected |= {f"run-{seed}/{path}": told for path, told in json.loads(out).items()}
    finally:
        for program in programs:
            program.kill()
    mount.end()
    assert digests(bucket) == expected
    uploads = bucket.client.list_multipart_uploads(Bucket=bucket.name)
    assert not uploads.get("Uploads")


def digests(bucket: Bucket) -> dict[str, str]:
    """What the bucket has, without the markers of directories."""
    found = {}
    for page in bucket.client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name):
        for one in page.get("Contents", []):
            if not one["Key"].endswith("/"):
                body = bucket.client.get_object(Bucket=bucket.name, Key=one["Key"])["Body"]
                found[one["Key"]] = hashlib.sha256(body.read()).hexdigest()
    return found
