"""The errors that nurseries raise, for people to read."""

from __future__ import annotations


def first_of(error: BaseException) -> BaseException:
    """The first error that groups hold, which is why they were raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
