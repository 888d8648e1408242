"""One mount's use of the cluster cache: the tier reads blocks, and the filler stores blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from fusefs.cache.file_cache import FileCache
from fusefs.cluster_cache.block import Domain
from fusefs.cluster_cache.filler import Filler
from fusefs.cluster_cache.remote import BlockBucket
from fusefs.cluster_cache.tier import ClusterTier, LookupOutcome
from fusefs.settings.mount import MountSettings
from fusefs.store.interface import Source

_LOOKUPS = tuple(
    outcome.value for outcome in LookupOutcome if outcome is not LookupOutcome.CANCELLED
)
_FILLS = ("stored", "present", "failed", "dropped", "lost")


class ClusterCache:
    """Reads and stores blocks for one mount. Belongs to the event loop; tasks run in `nursery`."""

    def __init__(
        self,
        settings: MountSettings,
        remote: BlockBucket,
        key: bytes,
        source: Source,
        cache: FileCache,
        nursery: trio.Nursery,
        is_busy: Callable[[], bool],
    ) -> None:
        """`remote` is the bucket of blocks, `key` the key of the domain, `source` has the objects.

        `is_busy` returns True while the mount downloads something.
        """
        assert settings.cluster_cache is not None
        self._place = settings.cluster_cache
        self._is_signed = bool(key)
        self._domain = Domain(settings.endpoint_url or "", settings.source.bucket, key)
        self.tier = ClusterTier(source, remote, self._domain, nursery)
        self.filler = Filler(self.tier, remote, self._domain, cache, is_busy)

    async def run(self) -> None:
        """Open the bucket and then store blocks in it, until cancelled."""
        await self.tier.run()
        await self.filler.run()

    def describe(self) -> dict[str, Any]:
        """Return the state and the counts of lookups and stored blocks, as plain JSON data."""
        lookups, fills = self.tier.counted, self.filler.counted
        return {
            "place": str(self._place),
            "blocks": self._domain.prefix,
            "is_signed": self._is_signed,
            "state": self.tier.state,
            "why": self.tier.why,
            "opened": self.tier.breaker.opened,
            "deadline_s": self.tier.deadline.wait_s,
            "lookups": {name: lookups[name] for name in _LOOKUPS},
            "read_bytes": lookups["bytes_read"],
            "fills": {name: fills[name] for name in _FILLS},
            "queued_fills": self.filler.queued,
            "stored_bytes": fills["bytes_stored"],
        }
