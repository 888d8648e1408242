"""fusefs: an S3 bucket as a file system with a local cache, read at the disk's own speed."""

__version__ = "0.2.0"
