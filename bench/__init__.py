"""Measurements of fusefs against the bare disk, the bare client and the peers."""
