"""What is trained: the whole model, a part of it, or an adapter on it."""
