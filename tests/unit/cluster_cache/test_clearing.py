"""What `fusefs cluster-cache clear` reports."""

from __future__ import annotations

from fusefs.cluster_cache.cluster_cache import ClearJob


def test_what_could_not_be_removed_is_not_counted_as_removed() -> None:
    clearing = ClearJob()
    clearing.note([("a", 3), ("b", 5)], {"b"})
    clearing.note([("c", 7)], set())
    assert (clearing.blocks, clearing.bytes, clearing.failed) == (2, 10, 1)
