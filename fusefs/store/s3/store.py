"""One bucket over S3: the implementation of `fusefs.store.contract.Store`.

Each verb has a module of its own, which describes its requests (address.py) and reads their
answers. requester.py sends all requests in the same way: they wait for a connection of the budget,
are signed (http/sigv4.py), and are sent by libcurl in threads of its own (store/engine). botocore
finds the credentials, and the address if it does not follow from the settings (access.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import trio

from fusefs.store.engine.engine import Engine, open_engine
from fusefs.store.errors import AccessDeniedError, CredentialsError, StoreError, UnsupportedError
from fusefs.store.http import redirects
from fusefs.store.interface import ListPage, ObjectInfo, UnansweredChanges
from fusefs.store.s3 import copy as copying
from fusefs.store.s3 import delete as deleting
from fusefs.store.s3 import head as heading
from fusefs.store.s3 import multipart
from fusefs.store.s3 import put as putting
from fusefs.store.s3.conditions import Fence
from fusefs.store.s3.get import Described, Getter
from fusefs.store.s3.list import list_call, parse
from fusefs.store.s3.requester import Requester
from fusefs.store.s3.settings import S3Settings
from fusefs.store.s3.sorted_listing import SortedListings, is_in_order

CHECK_TIME_S = 5.0


class S3Store:
    """One bucket; implements `fusefs.store.contract.Store`."""

    def __init__(
        self, settings: S3Settings, engine: Engine, described: Described = lambda _info: None
    ) -> None:
        """`described` gets objects whose metadata a GET has shown."""
        self.settings = settings
        self.requester = requester = Requester(settings, engine)
        self.unanswered = UnansweredChanges()
        self.fence = fence = Fence(requester)
        self.tokens = fence.tokens
        # True if `check` found no object.
        self.is_prefix_empty = False
        self.sorted_listings = SortedListings(partial(self._page, max_keys=1000))
        self.getter = Getter(requester, described)
        self.download = self.getter.download
        self.put_file = partial(putting.put_file, fence)
        self.begin_upload = partial(multipart.begin, fence)
        self.resume_upload = partial(multipart.resume, fence)
        self.abort_upload = partial(multipart.abort, requester)
        self.list_uploads = partial(multipart.pending, requester)
        self.copy = partial(copying.copy, fence)
        self.delete = partial(deleting.delete, fence)
        self.delete_many = partial(deleting.delete_many, fence)
        self.complete = multipart.Upload.complete
        self.hurry = requester.reprioritize
        self.counters = requester.counters

    @property
    def principal(self) -> str:
        """A stable name, without a secret, of the credentials' identity; known after `check`."""
        assert self.requester.source.principal is not None
        return self.requester.source.principal

    @property
    def answered(self) -> float:
        """The time (trio's seconds) of S3's last answer: a success, or an error like 404 or 412."""
        return self.requester.last_answer

    async def confirm(self, key: str, found: ObjectInfo | None) -> None:
        """Do nothing: this store does not record which changes had no answer."""

    async def check(self, prefix: str) -> None:
        """Check that the bucket can be listed below `prefix`.

        Raises:
            StoreError: the bucket can't be listed; the message is one line for the user.
        """
        where = f"s3://{self.settings.bucket}/{prefix}"
        try:
            page = await self.requester.send(
                list_call(prefix, "/", "", 1, ""),
                lambda answer: parse(answer.body, prefix),
                retry_time_s=CHECK_TIME_S,
            )
        except StoreError as error:
            raise type(error)(self._in_full(f"can't read {where}", error)) from error
        self.is_prefix_empty = not (page.objects or page.prefixes or page.next_token)

    def _in_full(self, what: str, error: StoreError) -> str:
        """Return the sentence `what` with the endpoint, the error, and a missing permission.

        The endpoint may come from the AWS configuration.
        """
        access = self.requester.source.access
        endpoint, origin = self.settings.endpoint_url, access.url if access is not None else ""
        if endpoint is None and origin and not redirects.is_aws(origin):
            endpoint = f"{origin} (endpoint_url of the AWS configuration)"
        at = f" at {endpoint}" if endpoint and endpoint.split()[0] not in str(error) else ""
        whose = ""
        if type(error) is AccessDeniedError and access is not None:
            whose = f"; {access.name} lacks s3:ListBucket there"
        return f"{what}{at}: {error}{whose}"

    async def is_refused(self, prefix: str) -> bool | None:
        """True if S3 refuses to list a prefix with fresh credentials, False if S3 lists it.

        None if neither is certain: no answer, expired credentials, a wrong clock.
        """
        source = self.requester.source
        for _ in range(2):
            used = source.access
            try:
                # The same kind of listing as `check`: a policy may allow just this kind.
                await self.requester.attempt(list_call(prefix, "/", "", 1))
            except StoreError as error:
                if error.has_expired:
                    source.renew()
                may_help = error.is_refusal or isinstance(error, CredentialsError)
                if may_help and await source.has_renewed(used):
                    continue
                return error.is_refusal or None
            self.requester.last_answer = trio.current_time()
            return False
        return None

    async def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "/",
        start_after: str = "",
        max_keys: int = 1000,
        sorts: bool = True,
    ) -> ListPage:
        is_whole = max_keys >= 1000
        if not (is_whole and sorts and self.sorted_listings.has(prefix, delimiter)):
            page = await self._page(
                prefix, delimiter, "", start_after=start_after, max_keys=max_keys
            )
            if not is_whole or is_in_order(page, delimiter, start_after):
                return page
            if not sorts:
                return replace(page, is_ordered=False)
        return await self.sorted_listings.page(prefix, delimiter, start_after, max_keys)

    async def _page(
        self, prefix: str, delimiter: str, token: str, *, start_after: str = "", max_keys: int
    ) -> ListPage:
        """Return the next page of a listing in the store's order, empty only at the end.

        Stores that skip many deleted objects send pages without entries, which are not the end.
        """
        while True:
            call = list_call(prefix, delimiter, start_after, max_keys, token)
            page = await self.requester.send(call, lambda answer: parse(answer.body, prefix))
            if page.last or page.next_token is None:
                return page
            if page.next_token == token:
                raise UnsupportedError("this server's listings come to no end")
            token = page.next_token

    async def head(self, key: str) -> ObjectInfo:
        return (await heading.head(self.requester, key))[0]


@asynccontextmanager
async def open_store(
    settings: S3Settings, described: Described = lambda _info: None
) -> AsyncIterator[S3Store]:
    """Yield a store with an engine of its own; the tasks of both end with the block.

    An exception of the block is raised as it is, not in a group.
    """
    async with open_engine(settings.max_connections) as engine:
        yield S3Store(settings, engine, described)
