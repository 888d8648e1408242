"""Daemons that are upgraded, and daemons for which there is too little memory, go unnoticed."""

from __future__ import annotations

import pytest

from tests.support.machine.cgroup import memory_group
from tests.support.mounting import Mount, fusefs
from tests.support.semantics import states
from tests.support.sharing import in_storms
from tests.support.survival.surviving import filled as filled
from tests.support.survival.surviving import (
    keeper_status,
    serving_pid,
    survivors,
)
from tests.support.survival.surviving import survival as survival
from tests.support.waiting import until


@states(
    "An upgrade replaces the daemon without an error, and a new daemon that can't start leaves the"
    " old one in place."
)
@in_storms("upgrades", 1, 20)
def test_upgrades_go_unnoticed(survival: Mount, upgrades: int) -> None:
    with survivors(survival):
        for _ in range(upgrades):
            before = serving_pid(survival)
            fusefs("upgrade", survival.path, environment=survival.environment)
            assert serving_pid(survival) != before
        before = serving_pid(survival)
        failed = fusefs(
            "upgrade",
            survival.path,
            "--endpoint-url",
            "http://127.0.0.1:1",
            "--retry-time",
            "1s",
            environment=survival.environment,
            check=False,
        )
        assert failed.returncode == 1
        assert serving_pid(survival) == before


@pytest.mark.storm
def test_daemons_that_the_kernel_kills_for_memory_are_replaced(survival: Mount) -> None:
    with survivors(survival):
        for number in range(3):
            with memory_group(f"fusefs-test-oom-{number}") as group:
                if group is None:
                    pytest.skip("no memory cgroup can be made here")
                # What a daemon has stays charged elsewhere, so a page more is the end.
                group.limit(0)
                victim = serving_pid(survival)
                group.add(victim)
                until(lambda old=victim: serving_pid(survival) != old, "it was not killed")
    assert "signal 9" in keeper_status(survival)["last_reason"]
