"""The diagnosis of a machine, a mount or a bucket (`fusefs doctor`), and `fusefs report`."""
