"""The operations by their names in the log: what they count as, and what failures mean to them."""

from __future__ import annotations

from dataclasses import replace

from fusefs.store.errors import CredentialsError, Failure, NotFoundError, StoreError

_WRITES = {
    "PUT": "puts", "BEGIN UPLOAD": "puts", "PUT PART": "puts", "COMPLETE UPLOAD": "puts",
    "COPY": "copies", "COPY PART": "copies", "DELETE": "deletes", "ABORT UPLOAD": "deletes",
}  # fmt: skip
COUNTERS = {
    "GET": "gets", "HEAD": "heads", "LIST": "lists", "LIST PARTS": "lists",
    "LIST UPLOADS": "lists", **_WRITES,
}  # fmt: skip
# What does not say that a change was refused: no answer, and those of servers that have none.
NO_ANSWERS = frozenset((0, 500, 502, 504))


def is_change(operation: str) -> bool:
    return operation in _WRITES


def considered(operation: str, failure: Failure) -> Failure:
    """What a failure means to a certain operation."""
    if operation == "LIST" and failure.kind is NotFoundError:
        # Not the answer to a question for one object.
        return replace(failure, kind=StoreError, sentence="there is no such bucket")
    if operation in _WRITES and failure.kind is CredentialsError:
        # What has been written must not be lost because somebody rotates keys.
        return replace(failure, is_retryable=True, has_expired=True)
    return failure
