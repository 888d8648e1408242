"""fusefs: an S3 bucket as a file system with a local cache, read at the disk's own speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusefs.sampling import PlannedSampler as PlannedSampler
    from fusefs.sampling import plan as plan

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import what a training program uses when it does: daemons and commands need none of it."""
    if name in ("PlannedSampler", "plan"):
        from fusefs import sampling

        return getattr(sampling, name)
    raise AttributeError(f"module 'fusefs' has no attribute {name!r}")
