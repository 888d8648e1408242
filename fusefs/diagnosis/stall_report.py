"""The waits of programs in sentences, and what may be changed about them.

The shares are those of time in which at least one request waited for something; of
several things at once each counts, so the shares may add up to more than the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Shares = Mapping[str, float]

# Below this share of the time a wait is not worth a word, nor below the next one a hint.
LEAST_SHARE = 0.005
LEAST_FOR_HINT = 0.05
# Most causes that a sentence names.
MOST_CAUSES = 3

# By cause: what is waited for, and what to do about it.
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
    """A sentence for each of the last spans of time in which programs waited."""
    found = [sentence(stalls["shares"].get(key, {}), span) for key, span in _SPANS.items()]
    waited = [one for one in found if one is not None]
    yield from waited or ["programs waited for nothing in the last 5 minutes"]


def sentence(shares: Shares, span: str) -> str | None:
    """The share of a span of time that programs waited, and for what; None if they did not."""
    if shares.get("any", 0.0) < LEAST_SHARE:
        return None
    parts = [f"{shares[cause]:.0%} {_CAUSES[cause][0]}" for cause in _causes(shares)]
    # Of many causes each may be too small to be named.
    causes = f": {', '.join(parts)}" if parts else ""
    return f"programs waited {shares['any']:.0%} of {span}{causes}"


def hint(stalls: Mapping[str, Any], *, has_room: bool = True) -> str | None:
    """A change that helps against the cause of most waits, in the latest such span.

    Without `has_room` in the cache nothing is to be fetched ahead.
    """
    hints = (advice(stalls["shares"].get(key, {}), has_room=has_room) for key in _SPANS)
    return next((one for one in hints if one is not None), None)


def advice(shares: Shares, *, has_room: bool = True) -> str | None:
    """Advice about the cause that was waited for most."""
    causes = _causes(shares)
    if not causes or shares[causes[0]] < LEAST_FOR_HINT:
        return None
    found = _CAUSES[causes[0]][1]
    return found if has_room or "fusefs warm" not in found else _CAUSES["cache_full"][1]


def _causes(shares: Shares) -> list[str]:
    """The causes that are worth a word, the largest share first; of a later daemon's, the known."""
    known = [cause for cause in _CAUSES if shares.get(cause, 0.0) >= LEAST_SHARE]
    return sorted(known, key=lambda cause: -shares[cause])[:MOST_CAUSES]
