"""What runs in processes of its own and does the timed reading and writing."""
