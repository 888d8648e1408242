"""Blocks of objects in an S3-compatible store near the nodes, shared by all mounts of a cluster."""
