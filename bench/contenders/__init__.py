"""The contenders: the bare disk, the bare client, fusefs in its variants, other mounts."""
