"""Which pages are in order, and which listings come to no end."""

from __future__ import annotations

import pytest

from fusefs.store.errors import UnsupportedError
from fusefs.store.interface import ListPage, ObjectInfo
from fusefs.store.s3.sorted_listing import SortedListings, is_in_order


def page(*keys: str, more: bool = True) -> ListPage:
    objects = [ObjectInfo(key, 1, '"e"', 0) for key in keys if not key.endswith("/")]
    prefixes = [key for key in keys if key.endswith("/")]
    return ListPage(objects, prefixes, "more" if more else None, max(keys, default=""))


@pytest.mark.parametrize(
    ("listed", "delimiter", "after", "is_it"),
    [
        (page("a", "b", "c"), "/", "", True),
        (page("b", "a", more=False), "/", "", True),  # all of it
        (page("b", "a"), "/", "", False),
        (page("b", "c", more=False), "/", "b", False),  # it goes on with what there was
        (page("b/", "b-c/"), "/", "", False),
        (page("b/x", "b-c/x", "c"), "", "a/x", True),  # by path segments
        (page("b/x", "c", "b/y"), "", "", False),
        (page(), "/", "a", True),
    ],
)
def test_a_page_is_in_order_if_the_next_can_go_on_behind_it(
    listed: ListPage, delimiter: str, after: str, is_it: bool
) -> None:
    assert is_in_order(listed, delimiter, after) is is_it


async def test_a_server_that_always_sends_the_same_page_is_given_up() -> None:
    async def fetch(_folder: str, _delimiter: str, _token: str) -> ListPage:
        return page("d/b", "d/a")

    with pytest.raises(UnsupportedError, match="no end"):
        await SortedListings(fetch).page("d/", "/", "", 1000)


async def test_pages_are_of_the_prefix_alone() -> None:
    pages = [page("d/ab", "d/é/", "d/a"), page("d/b", "d/a\U0001f680", more=False)]

    async def fetch(folder: str, _delimiter: str, token: str) -> ListPage:
        assert folder == "d/"
        return pages[1] if token else pages[0]

    listings = SortedListings(fetch)
    first = await listings.page("d/a", "/", "", 2)
    assert ([info.key for info in first.objects], first.next_token) == (["d/a", "d/ab"], "d/ab")
    second = await listings.page("d/a", "/", first.last, 2)
    assert [info.key for info in second.objects] == ["d/a\U0001f680"]
    assert (second.next_token, second.listed_at) == (None, first.listed_at)
    assert (await listings.page("d/", "/", "d/b", 9)).prefixes == ["d/é/"]
    assert (listings.count, listings.has("d/x", "/"), listings.has("d/", "")) == (1, True, False)
