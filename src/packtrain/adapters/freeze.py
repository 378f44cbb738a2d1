"""Which parameters of the base model are trained: all, or what ``method: freeze`` leaves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from packtrain.config.blocks import block_fault, block_range
from packtrain.config.schema import MethodSection
from packtrain.errors import UserError
from packtrain.models.plan import ModelPlan


def freeze(model: nn.Module, plan: ModelPlan, method: MethodSection) -> None:
    """Set ``requires_grad`` of every parameter.

    ``trainable`` names what is trained; without it, everything but the embedding and the first ``freeze_first``
    blocks is. A head that shares the embedding's weight is trained or frozen with the embedding.

    Raises:
        UserError: a name that the model does not have.
    """
    if method.trainable:
        prefixes = [p for name in method.trainable for p in _prefixes(name, plan)]
        trained = {id(p) for name, p in model.named_parameters() if _under(name, prefixes)}
        kept: set[int] = set()
    else:
        prefixes = [plan.embedding, *plan.block_names()[: method.freeze_first]]
        kept = {id(p) for name, p in model.named_parameters() if _under(name, prefixes)}
        trained = {id(p) for p in model.parameters()} - kept
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def train_also(model: nn.Module, plan: ModelPlan, parts: Sequence[str]) -> None:
    """Train whole parts of the model beside an adapter: ``method.also_train``."""
    for part in parts:
        for prefix in _prefixes(part, plan):
            model.get_submodule(prefix).requires_grad_(True)


def _under(name: str, prefixes: list[str]) -> bool:
    return any(name.startswith(prefix + ".") for prefix in prefixes)


def _prefixes(name: str, plan: ModelPlan) -> list[str]:
    """The module names that one entry of ``method.trainable`` means."""
    parts = {"embedding": plan.embedding, "norm": plan.norm, "head": plan.head}
    if parts.get(name):
        return [str(parts[name])]
    if fault := block_fault(name, plan.num_blocks):
        raise UserError("method.trainable", *fault)
    blocks = block_range(name)
    assert blocks is not None, "block_fault looked"
    return plan.block_names()[blocks.start : blocks.stop]
