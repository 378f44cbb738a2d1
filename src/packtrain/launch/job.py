"""What a rank does once it has joined the group: train, then save what the user came for."""

from __future__ import annotations

from pathlib import Path

from packtrain.config.schema import Recipe
from packtrain.export.final import save_final
from packtrain.launch import native
from packtrain.parallel.world import World
from packtrain.train.loop import Stop
from packtrain.train.run import train
from packtrain.train.session import Beat


def run(folder: Path, recipe: Recipe, world: World, stop: Stop, beat: Beat) -> bool:
    """Train to the end and write ``final/``. Returns False where ``stop`` ended it early, with a checkpoint."""
    try:
        result = train(folder, recipe, world, stop, beat)
        if not result.stopped:
            beat("saving")
            save_final(result.session)
    finally:
        if world.local_rank == 0:
            native.clean(recipe)
    return not result.stopped
