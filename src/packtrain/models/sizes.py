"""Sizes that the planner counts with, kept apart from torch."""

LOSS_CHUNK = 2048
"""Labelled positions whose logits exist at once."""
