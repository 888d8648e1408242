"""Answers of S3 as the engine hands them on: success, or the failure that they stand for."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from fusefs.store import unreachable
from fusefs.store.engine.engine import Completion
from fusefs.store.errors import (
    Failure,
    StaleVersionError,
    StoreError,
    from_body,
    region_of,
    unreachable_failure,
)
from fusefs.store.http import redirects

if TYPE_CHECKING:
    from fusefs.store.s3.access import Access
    from fusefs.store.s3.address import Call

OTHER_OBJECT = Failure(StaleVersionError, "the object has been replaced")
# Perhaps a proxy's mistake.
OTHER_RANGE = Failure(
    StoreError,
    "S3 sent another range than the requested one",
    is_retryable=True,
    longest_s=10.0,
)
OTHER_SIZE = Failure(
    StoreError, "what S3 sends is not the object as it is stored (is that compressed?)"
)
_TOO_SHORT = Failure(StoreError, "the file became shorter while it was sent")
_NOT_THE_OBJECT = {"etag": OTHER_OBJECT, "range": OTHER_RANGE, "size": OTHER_SIZE}
_LOCAL = ("sink-full", "sink-failed", "source-failed")


def failure_of(
    completion: Completion, call: Call, access: Access, signed_offset_s: float
) -> Failure | None:
    """The failure that a completion stands for; None if S3 did what was requested.

    `signed_offset_s` is that of the store's clock when the request was signed.

    Raises:
        OSError: the local file of the sink or the body can't be used.
    """
    error, address = completion.error, access.address
    if completion.status >= 300:
        return _refusal(completion, access, signed_offset_s)
    if error is None:
        return None
    if error == "too-large" and call.method == "GET" and call.key:
        return None  # the headers tell which object came in place of the requested one
    if error in _LOCAL:
        if not completion.errno:
            return _TOO_SHORT
        raise OSError(completion.errno, os.strerror(completion.errno))
    if error in _NOT_THE_OBJECT:
        return _NOT_THE_OBJECT[error]
    return unreachable_failure(
        unreachable.of_engine(completion, address.origin, address.route.proxy)
    )


def _refusal(completion: Completion, access: Access, signed_offset_s: float) -> Failure:
    status, headers = completion.status, completion.headers
    text = completion.body.decode(errors="replace")
    failure = from_body(status, text, headers.get("x-amz-request-id", ""))
    region, origin = region_of(status, headers, text), access.address.origin
    if status in redirects.REDIRECTS and not redirects.is_aws(origin):
        try:
            redirects.check(headers.get("location"), origin, knows_region=bool(region))
        except redirects.RedirectError as error:
            return Failure(redirects.RedirectError, str(error), status)
    is_off = access.clock.corrects(status, failure.code, headers, signed_offset_s)
    if is_off and access.credentials is not None:
        return replace(failure, is_retryable=True)
    return replace(failure, region=region) if region and region != access.region else failure
