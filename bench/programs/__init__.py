"""The programs that do the timed reading and writing, in processes of their own."""
