"""The cluster cache of one mount: its bucket, the tier above S3, and what fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import trio

from fusefs.cache.file_cache import FileCache
from fusefs.cluster_cache.block import Domain
from fusefs.cluster_cache.filler import Filler
from fusefs.cluster_cache.remote import BlockBucket
from fusefs.cluster_cache.tier import ClusterTier, LookupOutcome
from fusefs.settings.mount import MountSettings
from fusefs.store.errors import StoreError
from fusefs.store.interface import Source

_LOOKUPS = tuple(
    outcome.value for outcome in LookupOutcome if outcome is not LookupOutcome.CANCELLED
)
_FILLS = ("stored", "present", "failed", "dropped", "lost")


@dataclass
class ClearJob:
    """The removal of all blocks that a mount's domain has of its bucket."""

    blocks: int = 0
    bytes: int = 0
    failed: int = 0
    why: str | None = None
    has_ended: bool = False

    def note(self, blocks: list[tuple[str, int]], failed: set[str]) -> None:
        """These names and sizes were to be removed, and some could not be."""
        removed = [size for name, size in blocks if name not in failed]
        self.blocks += len(removed)
        self.bytes += sum(removed)
        self.failed += len(blocks) - len(removed)


class ClusterCache:
    """Belongs to the event loop; its tasks run in `nursery`."""

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
        """`remote` is its bucket, `key` that of the domain.

        `is_busy` says whether something is downloaded.
        """
        assert settings.cluster_cache is not None
        self._place = settings.cluster_cache
        self._is_signed = bool(key)
        self._nursery = nursery
        self._domain = Domain(settings.endpoint_url or "", settings.source.bucket, key)
        self._remote = remote
        self.tier = ClusterTier(source, self._remote, self._domain, nursery)
        self.filler = Filler(self.tier, self._remote, self._domain, cache, is_busy)
        self._clearing: ClearJob | None = None

    async def run(self) -> None:
        """Open the bucket and fill it, until cancelled."""
        await self.tier.run()
        await self.filler.run()

    def describe(self) -> dict[str, Any]:
        """Its state, and what became of lookups and of fills, as JSON can hold it."""
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

    def clear(self, *, is_new: bool) -> dict[str, Any]:
        """Begin to remove what the domain has stored of the mount's bucket, or tell how it goes."""
        clearing = self._clearing
        if clearing is None or (is_new and clearing.has_ended):
            clearing = self._clearing = ClearJob()
            self._nursery.start_soon(self._clear, clearing)
        return asdict(clearing)

    async def _clear(self, clearing: ClearJob) -> None:
        try:
            async for blocks in self._remote.names(self._domain.prefix):
                names = [name for name, _ in blocks]
                clearing.note(blocks, await self._remote.delete(names) if names else set())
        except Exception as error:  # a library's, too: it ends this removal alone
            clearing.why = str(error) if isinstance(error, StoreError) else repr(error)
        clearing.has_ended = True
