"""What the forward pass keeps for the backward pass, and what one block works with, in bytes.

Without compilation the counts are exact (``tests/unit/plan/test_activations.py`` counts the real tensors). Compiled
blocks keep fewer: what their partitioner keeps was read off the peaks of benchmarks/results.csv.
"""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.config.facts import Linear, ModelFacts
from packtrain.config.schema import Recipe
from packtrain.models.sizes import LOSS_CHUNK
from packtrain.plan.parameters import Parameters, block_linears, kv_width, table, targeted

_LOGIT_BYTES = 8
"""Of a logit while its chunk's loss and gradient are made: 16 bits, the fp32 gradient, and that in 16 bits again."""
_COMPILED_DORA = 1.22
"""Elements kept beside LoRA's for each output of a linear (one measurement: 3B, micro-batch 1)."""


@dataclass(frozen=True)
class Block:
    """Bytes for one token of one block.

    Attributes:
        kept: for the backward pass, where the block is not recomputed.
        entry: its input, which is all that a recomputed block keeps.
        working: gradients that exist beside ``kept`` while its backward pass runs.
    """

    kept: float
    entry: float
    working: float


def width(recipe: Recipe) -> int:
    """Bytes of a number of the forward and backward pass."""
    return 4 if recipe.train.precision == "fp32" else 2


def block(recipe: Recipe, model: ModelFacts, wide_stream: bool) -> Block:
    """Of a resolved recipe.

    Args:
        wide_stream: the embedding is stored in fp32 and not cast, so that what flows from block to block is fp32.
    """
    linears, size = block_linears(model), width(recipe)
    compiled = recipe.parallel.compile is True
    kept = _compiled(recipe, model, linears) * size if compiled else _eager(recipe, model, linears)
    wider = model.hidden * (4 - size) if wide_stream else 0
    entry = model.hidden * size + wider
    return Block(kept + (wider if compiled else 0), entry, 3 * model.intermediate * size)


def _compiled(recipe: Recipe, model: ModelFacts, linears: tuple[Linear, ...]) -> float:
    """Elements of a token: the block's input and middle; q, k, v and attention's output; gate and up; and what the
    linears that learn take in."""
    query, kv = query_width(linears, model), kv_width(model)
    elements = 2.0 * model.hidden + 2 * query + 2 * kv + 2 * model.intermediate
    elements += sum(_inputs(_learning(recipe, model)).values())
    if recipe.data.packing and recipe.launch.device == "cuda":
        elements += 2 * (query - kv)  # the variable-length kernel takes keys and values for each head
    if model.qk_norm:
        elements += query + kv
    if recipe.method.is_lora:
        chosen = targeted(recipe.method, model)
        elements += recipe.method.rank * len(chosen)
        if recipe.method.dora:
            elements += _COMPILED_DORA * sum(linear.outputs for linear in chosen)
    return elements


def _eager(recipe: Recipe, model: ModelFacts, linears: tuple[Linear, ...]) -> float:
    """Bytes of a token, as autograd saves them operation by operation."""
    query, kv, size = query_width(linears, model), kv_width(model), width(recipe)
    learning, lora = _learning(recipe, model), targeted(recipe.method, model) if recipe.method.is_lora else []
    stream = 2.0 * model.hidden
    if recipe.method.type in ("full", "freeze"):
        stream += 2 * model.hidden  # a trained norm keeps its input twice
    if model.qk_norm:
        stream += query + kv
    inside = float(query + 2 * kv + 3 * model.intermediate)
    if size == 4:
        shared = _inputs(learning)
        shared["output"] = query  # attention keeps its own output
        inside += sum(shared.values())
    else:  # each linear casts its input anew
        inside += sum(linear.inputs for linear in learning)
        inside += 0 if any(_group(linear) == "output" for linear in learning) and not lora else query
    if recipe.data.packing:
        inside += recipe.data.max_length if isinstance(recipe.data.max_length, int) else 0  # the mask, as numbers
    inside += recipe.method.rank * len(lora)
    if recipe.method.dora and lora:
        inside += 2 * sum(linear.outputs for linear in lora)
    return 4 * stream + size * inside


def _learning(recipe: Recipe, model: ModelFacts) -> list[Linear]:
    """The linears whose weight or adapter has a gradient, for which the input is kept."""
    if recipe.method.type in ("full", "freeze"):
        return list(block_linears(model))
    return targeted(recipe.method, model) if recipe.method.is_lora else []


_GROUPS = {
    "attention": ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"),
    "output": ("o_proj", "dense", "out_proj"),
    "mlp": ("gate_proj", "up_proj", "gate_up_proj", "fc1"),
    "down": ("down_proj", "fc2"),
}
"""Linears that take the same tensor in, by the last part of their names."""


def _group(linear: Linear) -> str:
    tail = linear.name.rsplit(".", 1)[-1]
    return next((group for group, names in _GROUPS.items() if tail in names), linear.name)


def _inputs(linears: list[Linear]) -> dict[str, float]:
    """Widths of the different tensors that ``linears`` take in."""
    return {_group(linear): float(linear.inputs) for linear in linears}


def query_width(linears: tuple[Linear, ...], model: ModelFacts) -> int:
    """Width of a token's queries: attention heads x head size."""
    own = next((x.outputs for x in linears if x.name.endswith("q_proj")), 0)
    return own or next((x.inputs for x in linears if x.name.endswith("o_proj")), model.hidden)


@dataclass(frozen=True)
class LossBytes:
    """What the head and the loss need at the end of a forward pass.

    Attributes:
        edge: hidden states around the head that stay. chunk: the logits of a chunk.
        gradient: the head's gradient, which stays until the backward pass has begun. making: beside it, while it is
            summed. cast: the head in the dtype of the arithmetic.
    """

    edge: float
    chunk: float
    gradient: float
    making: float
    cast: float

    @property
    def peak(self) -> float:
        logits = self.chunk / _LOGIT_BYTES * 2  # gradients in 16 bits while the head's is made
        return self.edge + self.cast + self.gradient + max(self.chunk, self.making + logits if self.making else 0)


def loss(recipe: Recipe, model: ModelFacts, found: Parameters, tokens: int, autocasts: bool) -> LossBytes:
    size = width(recipe)
    head = table(model)
    labels = min(LOSS_CHUNK, tokens)
    wide = autocasts and recipe.train.master_weights == "fp32" and found.head_trained
    return LossBytes(
        edge=6 * tokens * model.hidden * size,
        chunk=labels * model.vocabulary * (_LOGIT_BYTES if size == 2 else 12),
        gradient=head * 4 if found.head_trained else 0,
        making=head * (size + 4 if size < 4 else 4) if found.head_trained else 0,
        cast=head * size if wide and size < 4 else 0,
    )
