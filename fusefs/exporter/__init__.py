"""The metrics of all mounts of a machine for Prometheus: over HTTP, or as a file."""
