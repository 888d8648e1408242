"""The profile `cloud`: an S3 server that answers like a distant one, over TLS."""
