"""What a page of a listing tells of a directory."""

from __future__ import annotations

import pytest

from fusefs.posix.directory.segment import HiddenKeys, segment_from
from fusefs.store.interface import ListPage


@pytest.mark.parametrize("name", ["x" * 256, "a\0b", ".", ".."])
def test_a_key_that_no_name_can_express_is_in_doubt_nowhere(name: str) -> None:
    page = ListPage([], [], None, "")
    found = segment_from(page, "d/", name, None, HiddenKeys())
    assert name not in found.doubtful
    assert name not in found.entries


def test_the_file_at_a_position_is_in_doubt() -> None:
    page = ListPage([], [], None, "")
    assert segment_from(page, "d/", "ab", None, HiddenKeys()).doubtful == {"ab"}
