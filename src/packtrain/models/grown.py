"""Added tokens: their rows are parameters of their own beside the embedding's and the head's.

So they can be trained while the rest stays frozen, and no large table is copied to make it a little longer. Ids from
``first`` on are new; where the model's table has spare rows behind its tokenizer's ids, new tokens take their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container

import torch
import torch.nn.functional as F
from torch import nn

from packtrain.errors import UserError
from packtrain.models.added import AddedTokens
from packtrain.models.names import NEW_ROWS
from packtrain.models.plan import ModelPlan
from packtrain.models.weights import Reader, local_slices, local_tensor, resolve_key


def grow(model: nn.Module, plan: ModelPlan, added: AddedTokens) -> None:
    """Give the embedding and the head of a meta-device model rows for added tokens, shared where the two are tied."""
    embedding, head = model.get_submodule(plan.embedding), model.get_submodule(plan.head)
    if getattr(head, "bias", None) is not None:
        raise UserError("model.add_tokens", "the head of this model has a bias", "train without new tokens")
    _add_rows(embedding, len(added))
    embedding.forward = functools.partial(_embed, embedding, embedding.forward, added.first)
    if plan.tied:
        tie(model, plan)
    else:
        _add_rows(head, len(added))
    head.first_new = added.first  # type: ignore[assignment]


def tie(model: nn.Module, plan: ModelPlan) -> None:
    """Make the head use the embedding's new rows, which ``to_empty`` undoes."""
    embedding, head = model.get_submodule(plan.embedding), model.get_submodule(plan.head)
    setattr(head, NEW_ROWS, getattr(embedding, NEW_ROWS))


def start_new_rows(
    model: nn.Module, plan: ModelPlan, added: AddedTokens, reader: Reader, only: Container[nn.Parameter]
) -> None:
    """Fill the new rows among ``only``, each with the mean of the rows that its token's text had before."""
    for name in (plan.embedding,) if plan.tied else (plan.embedding, plan.head):
        key = resolve_key(reader.files, f"{name}.weight", plan.decoder)
        assert key is not None, name
        parameter = getattr(model.get_submodule(name), NEW_ROWS)
        if parameter not in only:
            continue
        rows = torch.stack([_mean_row(reader, key, ids) for ids in added.pieces])
        with torch.no_grad():
            local_tensor(parameter).copy_(rows[local_slices(parameter)])


def whole_table(table: torch.Tensor, new_rows: torch.Tensor, first: int) -> torch.Tensor:
    """The table (vocabulary, hidden) with the new rows in their places, longer where they need it."""
    size = max(len(table), first + len(new_rows))
    whole = table.new_empty(size, table.shape[1])
    whole[: len(table)] = table
    whole[first : first + len(new_rows)] = new_rows.to(table.dtype)
    return whole


def _add_rows(module: nn.Module, count: int) -> None:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    setattr(module, NEW_ROWS, nn.Parameter(weight.new_empty(count, weight.shape[1])))


def _embed(embedding: nn.Module, forward: Callable[..., torch.Tensor], first: int, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the table for known ids, new rows for the others, scaled alike where an architecture scales."""
    new_rows: torch.Tensor = embedding.new_rows  # type: ignore[assignment]
    known = forward(ids.clamp(max=first - 1))
    new = F.embedding((ids - first).clamp(min=0), new_rows).to(known.dtype)
    if hasattr(embedding, "embed_scale"):  # Gemma
        new = new * embedding.embed_scale.to(known.dtype)  # type: ignore[operator]
    return torch.where((ids >= first).unsqueeze(-1), new, known)


def _mean_row(reader: Reader, key: str, ids: tuple[int, ...]) -> torch.Tensor:
    rows = [reader.read(key, (slice(i, i + 1), slice(None))).float() for i in ids]
    return torch.cat(rows).mean(0)
