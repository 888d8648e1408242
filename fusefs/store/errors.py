"""What can go wrong with the bucket, as an errno and a sentence."""

from __future__ import annotations

import errno


class StoreError(Exception):
    """S3 could not do what was asked; `errno` says how a system call answers."""

    errno = errno.EIO


class NotFoundError(StoreError):
    """The object or the bucket does not exist (404)."""

    errno = errno.ENOENT


class AccessDeniedError(StoreError):
    """The credentials do not allow it, or there are none (401, 403)."""

    errno = errno.EACCES


class StaleVersionError(StoreError):
    """The object in the bucket is no longer the version that was asked for (412)."""

    errno = errno.ESTALE


class ArchivedError(StoreError):
    """The object is in an archive class and has to be restored first."""


class ThrottledError(StoreError):
    """S3 asked to slow down for longer than the retry time (429, 503)."""


class UnreachableError(StoreError):
    """No answer in the retry time: connection refused, time-outs, 5xx."""
