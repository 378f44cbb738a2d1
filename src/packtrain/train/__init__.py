"""Training: build, loop, schedule, evaluation."""
