"""Sizes that the planner counts with, kept apart from torch."""

LOSS_CHUNK = 2048
"""Labelled positions whose logits exist at once."""
QUANT_BLOCK = 64
"""Values of a row that share a scale in a quantised weight."""
