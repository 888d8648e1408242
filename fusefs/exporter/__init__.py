"""Export of the metrics of a machine's mounts to Prometheus, over HTTP or as a file."""
