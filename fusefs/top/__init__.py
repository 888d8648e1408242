"""The command `fusefs top`, which shows the work of this user's mounts and the causes of waits."""
