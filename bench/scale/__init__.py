"""The scale of fusefs: a bucket of 50 million objects, and a thousand nodes that start together."""
