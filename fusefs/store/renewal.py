"""Credentials that expire, renewed in a thread of their own as long as they are valid.

botocore renews them in the request that finds them near their end: from 15 minutes before
it on, one request waits for who gives them out, and where that fails the next one does;
in the last ten minutes all of them wait, and fail with it, though what they have is still
valid. Here requests go on with that, and the thread tries again now and then. In the last
minute it is as botocore has it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

logger = logging.getLogger("fusefs.store")

# Before their end, when requests wait for others.
LAST_S = 60
# After a renewal has ended, well or badly.
AGAIN_S = 30.0


def is_due(credentials: Any) -> bool:
    """True if a signature by these waits for other ones; those of no end never do."""
    return getattr(credentials, "is_due", False)


class RenewedCredentials:
    """Credentials that renew themselves: botocore's `RefreshableCredentials`, for any thread."""

    def __init__(self, credentials: Any) -> None:
        self._inner = credentials
        self._known: ReadOnlyCredentials | None = None
        self._lock = threading.Lock()
        self._is_renewing = False
        self._next = -math.inf

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def is_due(self) -> bool:
        """True if `get_frozen_credentials` waits for other ones."""
        return self._known is None or bool(self._inner.refresh_needed(LAST_S))

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """The credentials to sign with now. Blocks if it `is_due`.

        Raises:
            Exception: whatever botocore raises where it gets no others.
        """
        known = self._known
        if known is None or self.is_due:
            known = self._known = self._inner.get_frozen_credentials()
        elif self._inner.refresh_needed():
            self._renew()
        return known

    def _renew(self) -> None:
        """Have the thread renew them, if it does not and has not just done so."""
        with self._lock:
            if self._is_renewing or time.monotonic() < self._next:
                return
            self._is_renewing = True
        try:
            threading.Thread(target=self._work, name="fusefs-credentials", daemon=True).start()
        except RuntimeError:  # the system has none to give now
            self._ended()

    def _work(self) -> None:
        try:
            self._known = self._inner.get_frozen_credentials()
        except Exception as error:  # each source of credentials has its own
            logger.warning("the credentials are not renewed yet: %s", error)
        finally:
            self._ended()

    def _ended(self) -> None:
        self._next = time.monotonic() + AGAIN_S
        self._is_renewing = False


class RenewingProvider:
    """A credential provider of botocore's whose credentials are renewed so."""

    def __init__(self, provider: Any) -> None:
        self._inner = provider

    def load_credentials(self) -> Any:
        """As botocore's."""
        found = self._inner.load_credentials()
        return RenewedCredentials(found) if hasattr(found, "refresh_needed") else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
