"""The clients of a store, and the credentials that they are made with: found, and found again.

Who uses clients that are replaced meanwhile keeps them to the end of the request.
"""

from __future__ import annotations

import logging
import time

import trio

from fusefs.store.s3.clients import Clients, Refusals, S3Settings
from fusefs.store.s3.get import Attempt, AttemptError

logger = logging.getLogger("fusefs.store")

RECONNECT_EVERY_S = 2.0


class Access:
    """One store's clients. Belongs to the event loop.

    `clients` is None as long as they are to be made; `principal` is who they
    read as, a stable name without a secret, and known once they were made.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self.clients: Clients | None = None
        self.principal: str | None = None
        self._refusals = Refusals()
        self._connecting = trio.Lock()
        self._connected = 0.0

    async def connect(self) -> Clients:
        """The clients, which are made if need be.

        Raises:
            AttemptError: there are no credentials, or they can't be used.
        """
        async with self._connecting:
            if self.clients is None:
                connect = Attempt().guarded(lambda: Clients(self._settings, self._refusals))
                self.clients = await trio.to_thread.run_sync(connect)
                self.principal = self.principal or self.clients.principal
                self._connected = time.monotonic()
            return self.clients

    def renew(self) -> None:
        """Have the next request look for credentials anew: these have expired."""
        now = time.monotonic()
        if self.clients is not None and now - self._connected >= RECONNECT_EVERY_S:
            self.clients = None

    async def has_renewed(self, used: Clients | None) -> bool:
        """Whether there are other credentials than those of a refused request; then use them."""
        async with self._connecting:
            current = self.clients
            if used is not None and used is not current:
                return True
            now = time.monotonic()
            if current is None or now - self._connected < RECONNECT_EVERY_S:
                return False
            self._connected = now
            look = Attempt().guarded(current.has_other_credentials)
            try:
                if not await trio.to_thread.run_sync(look):
                    return False
            except AttemptError as error:
                logger.info("no other credentials: %s", error)
                return False
            self.clients = None
            return True

    def close(self) -> None:
        """Give up the connections."""
        if self.clients is not None:
            self.clients.s3.close()
