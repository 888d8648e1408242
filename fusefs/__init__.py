"""fusefs: an S3 bucket as a file system with a local cache, read at the disk's own speed."""

from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Return `plan` or `PlannedSampler`; their module is imported only when a program uses one."""
    if name in ("PlannedSampler", "plan"):
        from importlib import import_module

        return getattr(import_module("fusefs.sampling"), name)
    raise AttributeError(f"module 'fusefs' has no attribute {name!r}")
