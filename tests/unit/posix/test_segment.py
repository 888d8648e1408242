"""What a page of a listing tells of a directory."""

from __future__ import annotations

import pytest

from fusefs.posix.directory.pending_changes import put
from fusefs.posix.directory.segment import (
    UNCOVERED,
    Carried,
    Entry,
    HiddenKeys,
    Segment,
    segment_from,
)
from fusefs.store.interface import ListPage, ObjectInfo

FILE = ObjectInfo("d/b", 3, '"1"', 0)


@pytest.mark.parametrize("name", ["x" * 256, "a\0b", ".", ".."])
def test_a_key_that_no_name_can_express_is_in_doubt_nowhere(name: str) -> None:
    page = ListPage([], [], None, "")
    found = segment_from(page, "d/", name, None, HiddenKeys())
    assert name not in found.doubtful
    assert name not in found.entries


def test_the_file_at_a_position_is_in_doubt() -> None:
    page = ListPage([], [], None, "")
    assert segment_from(page, "d/", "ab", None, HiddenKeys()).doubtful == {"ab"}


def page_of(*, is_directory: bool, has_file: bool, carried: Carried | None) -> Segment:
    """`d/b` on the last page of `d/`, as a directory, as a file or as both."""
    page = ListPage([FILE] if has_file else [], ["d/b/"] if is_directory else [], None, "")
    return segment_from(page, "d/", "a/", carried, HiddenKeys())


@pytest.mark.parametrize("carried", [{}, {"b": FILE}, {"b": None}])
@pytest.mark.parametrize("has_file", [True, False])
@pytest.mark.parametrize("is_directory", [True, False])
def test_what_a_directory_hid_is_known_when_that_is_removed(
    carried: Carried, *, is_directory: bool, has_file: bool
) -> None:
    """Also where it is the next page that has the directory, or which may be older."""
    found = page_of(is_directory=is_directory, has_file=has_file, carried=carried)
    put(found, "b", UNCOVERED)
    beneath: Entry = FILE if has_file else carried.get("b")
    assert found.entries == ({} if beneath is None else {"b": FILE})
    assert found.ordered == list(found.entries)
    assert found.doubtful == ({"b"} if beneath is None and "b" in carried else set())
    put(found, "b", None)
    assert found.entries == {"b": None}
    put(found, "b", UNCOVERED)
    assert found.entries == ({} if beneath is None else {"b": FILE})
