"""Sizes at which FSDP2 is told to work otherwise; the planner counts with them, without torch."""

KEPT_LIMIT = 2**30
"""Bytes. A model this small stays gathered between forward and backward, which saves every second all-gather."""
UNREDUCED_LIMIT = 2**30
"""Bytes. Gradients kept whole between micro-batches save a reduce-scatter each, and cost this much memory at most."""
