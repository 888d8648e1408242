"""Programs that show fusefs at work."""
