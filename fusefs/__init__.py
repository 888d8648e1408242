"""fusefs: an S3 bucket as a file system with a local cache, read at the disk's own speed."""

from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import the API for training programs at its first use; daemons and commands don't use it."""
    if name in ("PlannedSampler", "plan"):
        from importlib import import_module

        return getattr(import_module("fusefs.sampling"), name)
    raise AttributeError(f"module 'fusefs' has no attribute {name!r}")
