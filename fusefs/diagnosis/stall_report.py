"""Sentences about programs' waits, and hints about how to reduce the waits.

A share is the part of a time span in which at least one request waited for a cause. Simultaneous
waits for several causes all count, so the shares may add up to over 100%.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Shares = Mapping[str, float]

# The least shares of the time for a wait to be mentioned, and to get a hint.
LEAST_SHARE = 0.005
LEAST_FOR_HINT = 0.05
# The maximum number of causes that a sentence names.
MOST_CAUSES = 3

# The end of a sentence about the wait and a hint, by cause.
_CAUSES = {
    "connection": (
        "for a free connection",
        "more requests at once take a larger --max-connections, and those of over 256 KiB a larger"
        " --memory-limit (4 MiB each)",
    ),
    "throttled": (
        "for S3 to take more requests",
        "S3 refuses requests as too many: read larger files (shards), or from more prefixes",
    ),
    "s3_first_byte": (
        "for S3's first byte",
        "fetch the data before it is needed (fusefs warm), or pack small files into shards",
    ),
    "s3_transfer": (
        "for bytes to and from S3",
        "bytes take long to and from S3: for reads, fetch the data beforehand (fusefs warm)",
    ),
    "metadata": (
        "for listings and attributes",
        "a longer --metadata-ttl asks S3 less often; shards have fewer names",
    ),
    "cache_disk": (
        "for the cache disk",
        "the disk is slow or busy: put --cache-dir on a faster one",
    ),
    "cache_full": (
        "for room in the cache",
        "the cache is full: a larger --cache-size (or disk) evicts less",
    ),
    "cluster_cache": (
        "for the cluster cache",
        "the cluster cache answers late: fusefs status shows its state, and"
        " docs/operate/cluster-cache.md says how large it should be",
    ),
    "credentials": (
        "for credentials",
        "fusefs fetches credentials, as after a start, or S3 refuses them: see the log, and"
        " check their provider",
    ),
}
_SPANS = {"10": "the last 10 s", "60": "the last minute", "300": "the last 5 minutes"}


def sentences(stalls: Mapping[str, Any]) -> Iterable[str]:
    """Yield a sentence for each time span with waits; without any, one sentence that says so."""
    found = [sentence(stalls["shares"].get(key, {}), span) for key, span in _SPANS.items()]
    waited = [one for one in found if one is not None]
    yield from waited or ["programs waited for nothing in the last 5 minutes"]


def sentence(shares: Shares, span: str) -> str | None:
    """Return a sentence about waits in a time span, with shares and causes; None without waits."""
    if shares.get("any", 0.0) < LEAST_SHARE:
        return None
    parts = [f"{shares[cause]:.0%} {_CAUSES[cause][0]}" for cause in _causes(shares)]
    # If there are many causes, each may be too small to be named.
    causes = f": {', '.join(parts)}" if parts else ""
    return f"programs waited {shares['any']:.0%} of {span}{causes}"


def hint(stalls: Mapping[str, Any], *, has_room: bool = True) -> str | None:
    """Return advice about the main cause of waits in the shortest span with long waits, or None.

    Without `has_room` in the cache, no advice is given to fetch data ahead.
    """
    hints = (advice(stalls["shares"].get(key, {}), has_room=has_room) for key in _SPANS)
    return next((one for one in hints if one is not None), None)


def advice(shares: Shares, *, has_room: bool = True) -> str | None:
    """Return advice about the main cause of waits; None if the waits are short."""
    causes = _causes(shares)
    if not causes or shares[causes[0]] < LEAST_FOR_HINT:
        return None
    found = _CAUSES[causes[0]][1]
    return found if has_room or "fusefs warm" not in found else _CAUSES["cache_full"][1]


def _causes(shares: Shares) -> list[str]:
    """Return the known causes to mention, the largest share first."""
    known = [cause for cause in _CAUSES if shares.get(cause, 0.0) >= LEAST_SHARE]
    return sorted(known, key=lambda cause: -shares[cause])[:MOST_CAUSES]
