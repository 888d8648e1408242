"""The programs that do the timed reading and writing, in their own processes."""
