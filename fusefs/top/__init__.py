"""The command `fusefs top`: the current work of this user's mounts, and the causes of waits."""
