"""Sequence parallelism inside a node: groups of ranks, what they exchange, and where tokens are sharded."""
