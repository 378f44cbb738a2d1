"""Packtrain: fine-tune language models on as many GPUs as there are, from one recipe."""

__version__ = "0.1.0"
