"""The workloads: the rows of the table and the functions that measure them."""
