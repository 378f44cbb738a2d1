"""Learning-rate schedules, as factors of the peak."""

from __future__ import annotations

import math

from packtrain.config.schema import TrainSection


def warmup_steps(section: TrainSection, total_steps: int) -> int:
    """A share of the steps below 1, a number of steps from 1 on."""
    steps = section.warmup * total_steps if section.warmup < 1 else section.warmup
    return min(math.ceil(steps), total_steps)


def factor(section: TrainSection, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step ``step`` (from 0) over its peak.

    Warm-up is linear and reaches the peak at its last step. ``cosine`` and ``linear`` then fall to
    ``min_learning_rate`` at the end; ``wsd`` stays and falls linearly over the last ``decay`` share
    (https://arxiv.org/abs/2404.06395); ``constant`` stays.
    """
    warmup = warmup_steps(section, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    low = section.min_learning_rate
    if section.schedule == "constant":
        return 1.0
    if section.schedule == "wsd":
        length = math.ceil(section.decay * total_steps)
        left = total_steps - step
        return 1.0 if left > length else low + (1 - low) * left / (length + 1)
    done = (step - warmup) / max(total_steps - warmup, 1)
    shape = 1 - done if section.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return low + (1 - low) * shape
