"""LIST requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fusefs.store.engine.engine import Completion
from fusefs.store.errors import AttemptError, Failure, UnreachableError
from fusefs.store.interface import ListPage
from fusefs.store.s3 import list_parser
from fusefs.store.s3.address import Call

# How long a request is repeated whose answer is no listing.
GARBLED_TIME_S = 3.0


def list_call(
    prefix: str, delimiter: str, start_after: str, max_keys: int, token: str = ""
) -> Call:
    """Make the request for a page of at most `max_keys` entries; "" is none.

    It is as `Store.list_page`, or goes on from a continuation token.
    """
    query: dict[str, Any] = {
        "list-type": 2,
        "prefix": prefix,
        "max-keys": max_keys,
        "encoding-type": "url",
    }
    chosen = {"delimiter": delimiter, "start-after": start_after, "continuation-token": token}
    query |= {name: value for name, value in chosen.items() if value}
    return Call("LIST", "GET", query=query)


def page_of(answer: Completion, prefix: str) -> ListPage:
    """Read the page in an answer, without what is not below its prefix.

    Raises:
        AttemptError: it is no listing.
    """
    try:
        page = list_parser.parse(answer.body)
    except list_parser.ListingError as error:
        # An answer that was cut is whole the next time; what the server itself writes
        # (a key with characters that XML has not) stays as it is.
        failure = Failure(
            UnreachableError,
            str(error),
            is_retryable=not error.is_final,
            longest_s=GARBLED_TIME_S,
        )
        raise AttemptError(failure) from error
    return _only_below(page, prefix)


def _only_below(page: ListPage, prefix: str) -> ListPage:
    """A page without what does not begin with `prefix`, which no server should send."""
    objects = [info for info in page.objects if info.key.startswith(prefix)]
    prefixes = [one for one in page.prefixes if one.startswith(prefix) and one != prefix]
    others = len(page.objects) + len(page.prefixes) - len(objects) - len(prefixes)
    if not others:
        return page
    return replace(page, objects=objects, prefixes=prefixes, unnamed=page.unnamed + others)
