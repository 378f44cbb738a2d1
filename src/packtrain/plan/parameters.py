"""Parameters of a model by their place, and how many of each a method trains. Counted, not estimated."""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.config.blocks import block_range
from packtrain.config.facts import Linear, ModelFacts
from packtrain.config.schema import MethodSection, Recipe


@dataclass(frozen=True)
class Counts:
    """Parameters of the base model that one state of training has: trained, or frozen.

    Attributes:
        linears: of the linears inside the blocks. other: norms and biases. tables: embedding and head.
    """

    linears: float
    other: float
    tables: float

    @property
    def total(self) -> float:
        return self.linears + self.other + self.tables


@dataclass(frozen=True)
class Parameters:
    """All parameters of a run.

    Attributes:
        trained, frozen: of the base model. adapters: beside it, all trained.
        trained_blocks: how many blocks hold trained parameters of the base model.
        first_trained: the first block that gradients flow through.
        head_trained: whether the head's weight is trained.
    """

    trained: Counts
    frozen: Counts
    adapters: float
    trained_blocks: float
    first_trained: int
    head_trained: bool

    @property
    def num_trained(self) -> float:
        return self.trained.total + self.adapters


def block_linears(model: ModelFacts) -> tuple[Linear, ...]:
    """The linears of one block; Llama's where they were not looked at."""
    if model.linears:
        return model.linears
    hidden, inner, kv = model.hidden, model.intermediate, kv_width(model)
    return (
        Linear("self_attn.q_proj", hidden, hidden), Linear("self_attn.k_proj", kv, hidden),
        Linear("self_attn.v_proj", kv, hidden), Linear("self_attn.o_proj", hidden, hidden),
        Linear("mlp.gate_proj", inner, hidden), Linear("mlp.up_proj", inner, hidden),
        Linear("mlp.down_proj", hidden, inner),
    )  # fmt: skip


def kv_width(model: ModelFacts) -> int:
    """Width of a token's keys, and of its values."""
    return model.kv_width or max(model.hidden // 4, 1)


def table(model: ModelFacts) -> int:
    """Parameters of the embedding, and of the head."""
    return model.vocabulary * model.hidden


def tables(model: ModelFacts) -> int:
    """Parameters of the embedding and the head together; a tied model has one."""
    return table(model) * (1 if model.tied else 2)


def in_blocks(model: ModelFacts) -> float:
    """Parameters of all blocks, the final norm among them."""
    return max(model.num_parameters - tables(model), 0)


def linear_parameters(model: ModelFacts) -> int:
    return min(sum(linear.numel for linear in block_linears(model)) * model.num_blocks, int(in_blocks(model)))


def parameters(recipe: Recipe, model: ModelFacts) -> Parameters:
    """What ``recipe`` (resolved) trains of ``model`` and beside it."""
    method = recipe.method
    blocks, embedding, head, norm = _trained_parts(method, model)
    share = len(blocks) / max(model.num_blocks, 1)
    linears = linear_parameters(model)
    other = in_blocks(model) - linears
    if model.tied:
        embedding = head = embedding or head
    num_tables = (embedding + head) / (2 if model.tied else 1)
    trained = Counts(
        linears * share,
        other * share if blocks else (model.hidden if norm else 0),
        num_tables * table(model),
    )
    frozen = Counts(linears - trained.linears, other - trained.other, tables(model) - trained.tables)
    first = 0 if embedding else min(blocks, default=model.num_blocks)
    adapters = _adapters(method, model)
    if method.is_adapter:
        first = max(model.num_blocks - _adapted_blocks(method, model), 0) if not embedding else 0
    return Parameters(trained, frozen, adapters, len(blocks), first, head)


def targeted(method: MethodSection, model: ModelFacts) -> list[Linear]:
    """The linears of a block that get LoRA."""
    linears = block_linears(model)
    if method.targets == "all_linear":
        return list(linears)
    wanted = set(method.targets)
    return [x for x in linears if any(x.name == tail or x.name.endswith("." + tail) for tail in wanted)]


def _trained_parts(method: MethodSection, model: ModelFacts) -> tuple[set[int], bool, bool, bool]:
    """(blocks, embedding, head, norm) of the base model that are trained whole."""
    every = set(range(model.num_blocks))
    if method.type == "full":
        return every, True, True, True
    if method.type == "freeze" and not method.trainable:
        blocks = {index for index in every if index >= method.freeze_first}
        return blocks, False, not model.tied, True
    parts = method.trainable if method.type == "freeze" else list(method.also_train)
    named: set[int] = set()
    for part in parts:
        named |= set(block_range(part) or ()) & every
    return named, "embedding" in parts, "head" in parts, "norm" in parts


def _adapted_blocks(method: MethodSection, model: ModelFacts) -> int:
    if method.type == "llama_adapter":
        assert isinstance(method.adapter_blocks, int), "resolve comes first"
        return min(method.adapter_blocks, model.num_blocks)
    return model.num_blocks


def _adapters(method: MethodSection, model: ModelFacts) -> float:
    if method.is_lora:
        each = sum(method.rank * (x.inputs + x.outputs) + method.dora * x.outputs for x in targeted(method, model))
        return each * model.num_blocks
    if not method.is_adapter:
        return 0
    assert isinstance(method.virtual_tokens, int), "resolve comes first"
    if method.type == "prefix":
        return method.virtual_tokens * model.num_blocks * 2 * kv_width(model)
    return (method.virtual_tokens * model.hidden + 1) * _adapted_blocks(method, model)
