"""What a model can do: loss on held-out rows, and what it writes against what was wanted."""
