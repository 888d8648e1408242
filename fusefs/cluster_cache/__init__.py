"""Cluster cache: blocks of objects in an S3-compatible store near the nodes, for all mounts."""
