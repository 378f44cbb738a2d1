"""The loss on held-out rows: each row counts once, whatever the number of processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from packtrain.data.batches import collate
from packtrain.data.order import share
from packtrain.data.packing import pack
from packtrain.train.session import Session


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats over the labelled tokens of all rows."""

    loss: float
    rows: int
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(session: Session) -> Evaluation | None:
    """Evaluate the model as it stands; None where the recipe holds nothing out."""
    rows = session.data.eval
    if rows is None:
        return None
    recipe, world, model = session.recipe, session.world, session.built.model
    packed, micro = recipe.data.packing, recipe.train.micro_batch_size
    assert isinstance(micro, int) and isinstance(recipe.data.max_length, int)
    sequences = pack(rows.lengths, recipe.data.max_length) if packed else _by_length(rows.lengths)
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    model.eval()
    for sequences_here in share(sequences, world.rank, world.size, micro):
        session.beat()
        batch = collate(rows, sequences_here, packed).to(world.device)
        losses = session.built.strategy.forward(**batch.inputs, per_token=True)
        sums += torch.stack([losses.double().sum(), losses.new_tensor(len(losses)).double()])
    model.train()
    loss_sum, count = world.sum(sums).tolist()
    return Evaluation(loss_sum / count if count else 0.0, len(rows), int(count))


def _by_length(lengths: np.ndarray) -> list[np.ndarray]:
    return [np.array([i]) for i in np.argsort(-lengths, kind="stable")]
