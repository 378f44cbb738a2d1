"""What a run will need, before a GPU is taken."""
