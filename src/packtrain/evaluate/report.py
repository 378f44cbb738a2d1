"""One model on held-out rows: what `packtrain eval` and the demo show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.config import Recipe
from packtrain.data import prepare_data
from packtrain.data.store import TokenStore
from packtrain.data.tokenizer import load_tokenizer
from packtrain.evaluate.loss import mean_loss
from packtrain.evaluate.model import load_for_generation
from packtrain.evaluate.rouge import Exchange, answer, exchanges, rouge

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Scores:
    """What a model scored: loss in nats per labelled token (None: not asked), ROUGE in percent, its answers."""

    loss: float | None
    rouge: dict[str, float]
    answers: list[Exchange]


def score(
    recipe: Recipe, folder: Path, rows: TokenStore, base: Path, *, limit: int, with_loss: bool = False,
    progress: Progress | None = None,
) -> Scores:  # fmt: skip
    """Load the model in ``folder`` as its users will and score it on the first ``limit`` rows.

    Args:
        recipe: the run's, resolved. base: the folder of the model it started from.
    """
    tokenizer = load_tokenizer(base, recipe.model.add_tokens)
    asked = exchanges(rows, tokenizer, limit)
    model = load_for_generation(folder, recipe.train.precision, recipe.launch.device, len(tokenizer))
    written = answer(model, tokenizer, asked, answer_limit(asked, tokenizer), progress)
    loss = mean_loss(model, rows) if with_loss else None
    return Scores(loss, rouge(written), written)


def answer_limit(asked: list[Exchange], tokenizer: Any) -> int:
    """Tokens an answer may take: half as many again as the longest that is wanted."""
    longest = max(len(tokenizer(e.wanted, add_special_tokens=False).input_ids) for e in asked)
    return longest * 3 // 2 + 4


def eval_rows(recipe: Recipe, model_folder: Path) -> TokenStore | None:
    """The evaluation rows of a resolved recipe."""
    length, seed = recipe.data.max_length, recipe.train.seed
    assert isinstance(length, int), "resolve comes first"
    return prepare_data(recipe.data, model_folder, length, seed, add_tokens=recipe.model.add_tokens).eval
