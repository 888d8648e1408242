"""What is wrong with a machine, a mount or a bucket (`doctor`), and all about it (`report`)."""
