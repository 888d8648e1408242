"""How a range is read: a small one in the event loop, what that can't in a thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fusefs.store.errors import StaleVersionError
from fusefs.store.priority import Urgency
from fusefs.store.s3.get import SMALL, AttemptError, Stream

if TYPE_CHECKING:
    from fusefs.store.s3.store import S3Store

logger = logging.getLogger("fusefs.store")


async def download(store: S3Store, stream: Stream, priority: Urgency, *, in_loop: bool) -> None:
    """As `Store.download`."""
    while True:
        stream.has_if_match = store.has_if_match
        try:
            if in_loop and stream.missing <= SMALL and await _is_read(store, stream, priority):
                return
            await store.retried("GET", stream.key, stream.run, priority, transfer=stream)
            return
        except StaleVersionError:
            version = stream.version
            if not stream.has_if_match or (await store.head(stream.key)).version != version:
                raise
            # This server's If-Match says no to the very ETag that it tells.
            logger.info("%s: If-Match is not to be relied on here", store.settings.bucket)
            store.has_if_match = False


async def _is_read(store: S3Store, stream: Stream, priority: Urgency) -> bool:
    """Read what a stream lacks in the event loop; False if a thread is to go on."""
    answer = await store.at_once(
        "GET", stream.key, headers=stream.asked(), size=stream.missing, priority=priority
    )
    if answer is None:
        return False
    try:
        stream.take(answer)
    except AttemptError as error:
        if not error.failure.is_retryable:
            raise store.failed("GET", stream.key, error.failure) from error
        return False
    return True
