"""What is remembered of this mount's changes, and for how long."""

from __future__ import annotations

import time

import pytest

from fusefs.posix.directory import pending_changes
from fusefs.posix.directory.pending_changes import KEPT_S, LocalNames
from fusefs.posix.directory.segment import ABSENT


@pytest.mark.parametrize("most", [100, 0])
def test_a_change_while_a_large_directory_is_copied_is_noticed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The rename of a million objects takes longer than changes are kept by name."""
    monkeypatch.setattr(pending_changes, "MOST_FORMER", most)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    local = LocalNames()
    local.set("dir/sub/", "before", None, lasting=False)
    now += 10
    listed_at = now
    now += 10
    local.set("dir/sub/", "meanwhile", ABSENT, lasting=False)
    now += 2 * KEPT_S
    local.set("other/", "late", None, lasting=False)
    assert local.has_changed("dir/", listed_at)
    assert not local.has_changed("dir/", listed_at + 11)
    assert local.has_changed("other/", now)


def test_a_change_elsewhere_is_none_of_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    local = LocalNames()
    local.set("other/", "early", None, lasting=False)
    now += 2 * KEPT_S
    local.set("other/", "late", None, lasting=False)
    assert not local.has_changed("dir/", 1000.0)
