"""The diagnosis of a machine, a mount or a bucket (`doctor`), and the archive (`report`)."""
