"""What `fusefs doctor` says of the parts of a mount, from its status."""

from pathlib import Path
from typing import Any

import pytest

from fusefs.diagnosis import mounted
from fusefs.diagnosis.findings import Level
from fusefs.diagnosis.subject import MountSubject

GOOD: dict[str, Any] = {
    "place": "s3://near/blocks/",
    "is_signed": True,
    "state": "closed",
    "why": "",
    "lookups": {"hits": 7, "bad": 0},
    "fills": {"failed": 0},
}


def findings(found: dict[str, Any] | None) -> list[tuple[Level, str]]:
    status = {"daemon": {"pid": 1, "uptime_s": 2.0}, "cluster_cache": found}
    checks = mounted.check(MountSubject(Path("/data"), status))
    return [(one.level, one.text) for one in checks if one.check == "cluster cache"]


def test_a_cluster_cache_that_works_is_named() -> None:
    assert findings(GOOD) == [(Level.OK, "s3://near/blocks/ answers")]
    assert findings(None) == []


@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        ({"state": "open", "why": "no answer"}, Level.PROBLEM, "is not in use: no answer"),
        ({"state": "opening", "why": ""}, Level.PROBLEM, "is not in use: it did not answer"),
        ({"lookups": {"hits": 1, "bad": 2}}, Level.PROBLEM, "2 blocks were damaged or forged"),
        ({"fills": {"failed": 3}}, Level.ADVICE, "did not take 3 blocks"),
        ({"is_signed": False}, Level.ADVICE, "can change the data that this"),
    ],
)
def test_what_is_wrong_with_a_cluster_cache_is_a_finding(
    change: dict[str, Any], level: Level, text: str
) -> None:
    assert any(one == level and text in what for one, what in findings(GOOD | change))


def test_a_mount_of_another_container_is_not_to_be_ended_by_force() -> None:
    other = MountSubject(Path("/mnt"), {"not_answering": "not registered here"})
    ours = MountSubject(Path("/mnt"), {"not_answering": "it has died", "daemon": {"pid": 4711}})
    advised = [next(mounted.check(one)).advice for one in (other, ours)]
    assert ["umount --force" in advice for advice in advised] == [False, True]
    assert "container that mounted it" in advised[0]
