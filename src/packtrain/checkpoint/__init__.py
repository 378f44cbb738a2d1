"""Checkpoints: sharded, atomic, verified, and free of the number of processes."""
