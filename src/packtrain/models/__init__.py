"""The model: where its parts are, how it is built without memory, and how its weights stream in."""
