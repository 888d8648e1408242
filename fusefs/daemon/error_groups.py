"""The first error of the exception groups that nurseries raise, for messages to users."""

from __future__ import annotations


def first_of(error: BaseException) -> BaseException:
    """Return the first error in (nested) exception groups, or `error` if it is no group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
