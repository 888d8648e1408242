"""The diagnosis of a machine, a mount or a bucket (`doctor`), and all about it (`report`)."""
