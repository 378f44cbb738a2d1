"""TensorBoard and Weights & Biases, fed from the events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packtrain.config.schema import Recipe
from packtrain.errors import UserError
from packtrain.metrics.events import Sink

_STEP_VALUES = ("loss", "lr", "grad_norm", "tokens_per_second", "memory", "epoch")
_EVAL_VALUES = ("loss", "perplexity")


def scalars(event: dict[str, Any]) -> dict[str, float]:
    """The numbers of a step or an evaluation, named ``train/...`` or ``eval/...``."""
    kinds = {"step": ("train", _STEP_VALUES), "eval": ("eval", _EVAL_VALUES)}
    prefix, names = kinds.get(event["event"], ("", ()))
    return {f"{prefix}/{n}": event[n] for n in names if isinstance(event.get(n), int | float)}


class TensorBoard:
    """Writes ``tensorboard/`` in the run folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, event: dict[str, Any]) -> None:
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of the same name at Weights & Biases; ``WANDB_MODE=offline`` keeps it in the run folder."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        config = recipe.model_dump(mode="json")
        self._run = wandb.init(
            project=recipe.log.project, name=folder.name, id=folder.name, dir=str(folder), config=config, resume="allow"
        )

    def write(self, event: dict[str, Any]) -> None:
        values = scalars(event)
        if values:
            self._run.log(values, step=event["step"])

    def close(self) -> None:
        self._run.finish()


def make_sinks(recipe: Recipe, folder: Path) -> list[Sink]:
    """The sinks that ``log.to`` names."""
    sinks: list[Sink] = []
    if "tensorboard" in recipe.log.to:
        sinks.append(TensorBoard(folder))
    if "wandb" in recipe.log.to:
        sinks.append(Wandb(folder, recipe))
    return sinks


def _missing(package: str) -> UserError:
    return UserError("log.to", f"{package} is not installed", f"pip install 'packtrain[{package}]'")
