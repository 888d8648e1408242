"""`fusefs top`: what all mounts of a machine do now, and what they wait for."""
