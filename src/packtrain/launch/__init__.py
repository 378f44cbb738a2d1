"""From a recipe to running processes, and the run folder that everybody reads."""
