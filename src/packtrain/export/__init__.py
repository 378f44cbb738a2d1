"""What the user came for: a folder that plain transformers and peft load."""
