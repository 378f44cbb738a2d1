from __future__ import annotations

import math
from typing import cast

from packtrain.parallel.world import World
from packtrain.train.faults import SpikeWatch, stalled


def spikes(losses: list[float]) -> list[int]:
    watch = SpikeWatch()
    return [step for step, loss in enumerate(losses, 1) if watch.usual_before(loss) is not None]


def test_a_jump_is_told_and_noise_is_not() -> None:
    noisy = [2.0 + 0.5 * math.sin(step * 1.7) for step in range(40)]
    assert spikes(noisy) == []
    assert spikes([*noisy, 5.2, *noisy]) == [41]
    assert spikes([9.0, 3.0, 9.0]) == []  # too few to know what is usual
    assert spikes([0.01] * 20 + [0.4]) == []  # forty times as much, and yet nothing
    assert spikes([4.0 - 0.05 * step for step in range(60)]) == []


def test_the_usual_loss_is_the_median() -> None:
    watch = SpikeWatch()
    for loss in (1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0, 2.0):
        assert watch.usual_before(loss) is None
    assert watch.usual_before(7.0) == 2.0


def test_who_waited_for_the_data() -> None:
    class Four:
        def gather(self, value: object) -> list[object]:
            return [0.1, 7.4, value, 61.0]

    said = stalled(cast(World, Four()), 0.0)
    assert said.startswith("the data came late (rank 1 7 s, rank 3 61 s)")
