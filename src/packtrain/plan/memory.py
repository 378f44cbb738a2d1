"""Peak memory of one process, term by term: what it keeps, and what exists only at some moment of a step.

Bytes are counted from shapes and dtypes. Only what a compiled block keeps, and what the libraries take for themselves,
was measured (docs/planning.md says how far the sums are from the peaks).
"""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.config.facts import Facts
from packtrain.config.resolve import stored_bytes
from packtrain.config.schema import Recipe
from packtrain.parallel.limits import KEPT_LIMIT, UNREDUCED_LIMIT
from packtrain.plan.activations import block, loss, width
from packtrain.plan.parameters import Parameters, in_blocks, parameters, table

Terms = dict[str, float]
"""Bytes by name, in the order in which they are shown."""
TERMS = {
    "weights": "weights that are only read, or cast",
    "quantised_weights": "quantised weights and their scales",
    "adapters": "adapters",
    "master_weights": "weights that are trained, as they are stored",
    "optimizer_states": "optimizer states",
    "gradients": "gradients",
    "activations": "activations kept for the backward pass",
    "working": "what one block works with",
    "gathered": "weights gathered or cast for a while",
    "loss": "logits, and the head's gradient",
    "communication": "buffers of collectives and of DeepSpeed",
    "workspace": "workspace of libraries",
}
_CPU_PROCESS, _CPU_PEFT = 0.25 * 2**30, 0.06 * 2**30  # what is imported
_CUDA_WORKSPACE = 0.08 * 2**30  # cuBLAS
_STEP_CHUNK = 6 * 4 * 2**24  # fp32 temporaries of optimizers with small states (train/adamw.py)


@dataclass(frozen=True)
class Peak:
    """The moment of a step at which most memory is used, and what uses it."""

    moment: str
    terms: Terms

    @property
    def total(self) -> float:
        return sum(self.terms.values())


def peak(recipe: Recipe, facts: Facts, micro_batch_size: int, recompute: float) -> Peak:
    """Of one process under a resolved recipe.

    Args:
        recompute: the share of blocks whose activations are computed again.
    """
    step = _Step(recipe, facts, micro_batch_size, recompute)
    moments = [step.loss(), step.backward(), step.reduced(), step.update()]
    return max(moments, key=lambda moment: moment.total)


def total(recipe: Recipe, facts: Facts, micro_batch_size: int, recompute: float) -> float:
    """Peak bytes of one process."""
    return peak(recipe, facts, micro_batch_size, recompute).total


class _Step:
    """An optimizer step of one process: what stays, and its moments."""

    def __init__(self, recipe: Recipe, facts: Facts, micro: int, recompute: float) -> None:
        assert isinstance(recipe.data.max_length, int)
        self.recipe, self.facts, self.model, self.share = recipe, facts, facts.model, recompute
        self.parallel, self.width = recipe.parallel, width(recipe)
        self.found = parameters(recipe, facts.model)
        self.tokens = micro * recipe.data.max_length
        self.kind = "zero" if recipe.parallel.strategy == "deepspeed" else recipe.parallel.strategy
        rows = -(-recipe.train.batch_size // facts.processes)
        self.accumulates = rows > micro
        self.sharding = sharding(recipe, facts)
        self.kept = resident(recipe, self.found, self.sharding)
        self.gradients = self.found.num_trained * self.sharding.gradient_bytes / self.sharding.gradients
        if self.kind == "zero" and recipe.parallel.offload != "none":
            self.gradients = 0.0  # they go to host memory a bucket at a time
        self.autocasts = self.kind in ("single", "ddp")
        self.head = loss(recipe, facts.model, self.found, self.tokens, self.autocasts)
        # What is recomputed is cast again.
        self.cast = _cast(recipe, self.found) * (1 - recompute) if self.autocasts else 0.0
        self.block = block(recipe, facts.model, self.wide_stream)

    @property
    def wide_stream(self) -> bool:
        trained = self.found.trained.tables >= table(self.model)
        return trained and self.autocasts and master_bytes(self.recipe) > self.width

    def loss(self) -> Peak:
        """The end of the last micro-batch's forward pass: every activation is there, and the logits of a chunk."""
        terms = self.during(self.early_gradients)
        terms["activations"] = self.activations()
        terms["loss"] = self.head.peak
        terms["gathered"] = self.cast + self.gathered(1)
        return Peak("loss", terms)

    def backward(self) -> Peak:
        """The last block's backward pass, the first to run: its gradients, and its activations, if it makes them again.

        Where some blocks recompute the last one does not (parallel/blocks.py), and is gone when another one does.
        """
        one = self.block
        terms = self.during(self.early_gradients)
        terms["activations"] = self.activations() + (one.kept * self.tokens if self.share == 1 else 0)
        terms["working"] = one.working * self.tokens
        terms["loss"] = self.head.edge + self.head.gradient
        terms["gathered"] = self.cast + self.gathered(3)
        terms["communication"] += self.reduced_block()
        return Peak("backward", terms)

    def reduced(self) -> Peak:
        """The end of the backward pass: all gradients are there, and those of the tables are being summed."""
        terms = self.during(self.gradients)
        terms["loss"] = self.head.edge
        if self.kind == "fsdp" and self.parallel.offload != "params":
            terms["communication"] += self.found.trained.tables * 4
        if self.autocasts and (self.model.tied or self.accumulates) and self.found.trained.tables:
            terms["working"] = table(self.model) * self.sharding.gradient_bytes  # the embedding's, before it is added
        return Peak("gradients", terms)

    def update(self) -> Peak:
        """The optimizer's step."""
        terms = self.during(self.gradients)
        terms["communication"] += self.sharding.step_bytes
        if self.recipe.train.optimizer != "adamw" and self.parallel.offload == "none":
            terms["communication"] += min(_STEP_CHUNK, 24 * self.found.num_trained / self.sharding.states)
        return Peak("update", terms)

    def during(self, gradients: float) -> Terms:
        terms = dict.fromkeys(TERMS, 0.0) | self.kept
        terms["gradients"] = 0.0 if self.parallel.offload == "params" else gradients
        terms["communication"] = self.sharding.buffers
        terms["workspace"] = _CUDA_WORKSPACE if self.facts.device == "cuda" else _CPU_PROCESS
        if self.facts.device == "cpu" and self.recipe.method.is_adapter:
            terms["workspace"] += _CPU_PEFT
        return terms

    @property
    def early_gradients(self) -> float:
        """Gradients that are there before the last backward pass: of earlier micro-batches, and DDP's buckets.

        FSDP keeps few gradients whole until the last micro-batch (parallel/limits.py).
        """
        if self.kind == "ddp":
            return self.gradients * (2 if self.accumulates else 1)
        if not self.accumulates:
            return 0.0
        trained = self.found.num_trained
        if self.kind == "fsdp" and trained * master_bytes(self.recipe) <= UNREDUCED_LIMIT:
            return trained * self.width
        return self.gradients

    def activations(self) -> float:
        one = self.block
        flowing = max(self.model.num_blocks - self.found.first_trained, 0)
        if self.parallel.recompute == "selective":
            return flowing * self.tokens * (one.kept * SELECTIVE + one.entry * (1 - SELECTIVE))
        entry = 0.0 if self.parallel.offload_activations else one.entry
        return flowing * self.tokens * ((1 - self.share) * one.kept + self.share * entry)

    def gathered(self, blocks: int) -> float:
        """Whole weights that exist for a while: the tables, and so many blocks (all of a small model)."""
        made = 0.0
        if self.recipe.method.type == "qlora":  # a quantised weight is made anew while its linear runs
            made = 2.0 * self.model.hidden * self.model.intermediate * self.width
        if not self.sharding.gathers:
            return made
        every = in_blocks(self.model) * self.sharding.gathered_bytes
        tables = (self.found.trained.tables + self.found.frozen.tables) * self.width
        if every + tables <= KEPT_LIMIT and self.kind == "fsdp" and self.parallel.offload != "params":
            return every + tables + made
        some = min(blocks * every / max(self.model.num_blocks, 1), every) + tables
        live = min(self.sharding.live * self.sharding.gathered_bytes, every + tables)
        return max(some, live) + made

    def reduced_block(self) -> float:
        """A block's gradients, whole, on their way to the shards: as they are made, and in fp32."""
        if self.kind != "fsdp" or not self.found.trained_blocks:
            return 0.0
        each = (self.found.trained.linears + self.found.trained.other) / self.found.trained_blocks
        return each * (self.width + 4)


@dataclass(frozen=True)
class Sharding:
    """Over how many processes each kind of state is spread, and what spreading it costs.

    Attributes:
        weights, gradients, states: the number of processes that share them.
        gradient_bytes: of a gradient, and of its weight as it is stored.
        gathers: whether weights are gathered for a while.
        gathered_bytes: of a weight inside the blocks that is gathered.
        live: parameters that ZeRO-3 may leave gathered.
        buffers: bytes that stay. step_bytes: that exist during the optimizer's step.
    """

    weights: int
    gradients: int
    states: int
    gradient_bytes: float
    gathers: bool = False
    gathered_bytes: float = 0.0
    live: float = 0.0
    buffers: float = 0.0
    step_bytes: float = 0.0


def sharding(recipe: Recipe, facts: Facts) -> Sharding:
    parallel = recipe.parallel
    if parallel.strategy == "deepspeed":
        return _zero(recipe, facts)
    offloads = parallel.offload == "optimizer"
    own = width(recipe) if offloads else master_bytes(recipe)
    if parallel.strategy != "fsdp":
        return Sharding(1, 1, 1, own)
    assert isinstance(parallel.shard_size, int), "resolve comes first"
    shards = parallel.shard_size
    gathered = stored_bytes(recipe) if recipe.method.is_adapter else width(recipe)
    return Sharding(shards, shards, shards, own, True, gathered)


def _zero(recipe: Recipe, facts: Facts) -> Sharding:
    """DeepSpeed keeps weights and gradients in the dtype of the arithmetic, and steps on fp32 copies."""
    stage, size, shards = recipe.parallel.zero_stage, width(recipe), facts.processes
    assert isinstance(stage, int) and isinstance(recipe.parallel.deepspeed_config, dict), "resolve comes first"
    config = recipe.parallel.deepspeed_config["zero_optimization"]
    trained = parameters(recipe, facts.model).num_trained
    bucket = min(float(config.get("reduce_bucket_size", 0)), trained) * size
    gathered = stored_bytes(recipe) if recipe.method.is_adapter else size
    masters = shards if stage >= 1 else 1
    # Stages 1 and 2 flatten all gradients and widen them at once, stage 3 those of a sub-group.
    if recipe.parallel.offload != "none":
        stepping = 0.0
    elif stage in (1, 2):
        stepping = trained * (size + 4) / shards
    else:
        stepping = min(trained, float(config.get("sub_group_size", trained))) * 4 / masters
    return Sharding(
        weights=shards if stage == 3 else 1,
        gradients=shards if stage >= 2 else 1,
        states=masters,
        gradient_bytes=size,
        gathers=stage == 3,
        gathered_bytes=gathered,
        live=float(config.get("stage3_max_live_parameters", 0)),
        buffers=2 * bucket + (2 * bucket if stage == 3 else 0),
        step_bytes=stepping,
    )


def resident(recipe: Recipe, found: Parameters, spread: Sharding) -> Terms:
    """What stays on the GPU (or in the process) for the whole run."""
    zero, size = recipe.parallel.strategy == "deepspeed", width(recipe)
    if recipe.parallel.offload == "params":
        return {}
    quantised = found.frozen.linears if recipe.method.type == "qlora" else 0.0
    plain = found.frozen.total - quantised
    trained = found.trained.total
    terms = {
        "weights": plain * size / spread.weights,
        "quantised_weights": quantised * stored_bytes(recipe) / spread.weights,
    }
    terms["adapters"] = found.adapters * spread.gradient_bytes / spread.weights
    terms["master_weights"] = trained * spread.gradient_bytes / spread.weights
    if recipe.parallel.offload != "optimizer":
        copies = 4.0 if zero else 0.0
        terms["master_weights"] += found.num_trained * copies / spread.states
        terms["optimizer_states"] = found.num_trained * state_bytes(recipe) / spread.states
    return terms


def _cast(recipe: Recipe, found: Parameters) -> float:
    """Autocast keeps what it has cast of the weights that linears use, until the backward pass has used it."""
    narrower = width(recipe) < master_bytes(recipe)
    return (found.trained.linears + found.adapters) * width(recipe) if narrower else 0.0


SELECTIVE = 0.5
"""The share of a block's activations that selective recompute keeps."""


def master_bytes(recipe: Recipe) -> int:
    """Bytes of a trained weight as it is stored, and so of its gradient."""
    return 4 if recipe.train.master_weights == "fp32" else 2


def state_bytes(recipe: Recipe) -> float:
    """Bytes of a trained weight's optimizer states."""
    state = {"adamw": 8.0, "adamw_bf16": 4.0, "adamw_8bit": 2.0 + 8 / 256}[recipe.train.optimizer]
    return state + (2 if _keeps_rest(recipe) else 0)


def _keeps_rest(recipe: Recipe) -> bool:
    """Whether a bf16 weight has what rounding lost beside it."""
    return recipe.train.master_weights == "bf16" and recipe.train.rounding == "kahan"


def stored_state_bytes(recipe: Recipe) -> float:
    """Bytes of a trained weight and its optimizer states: what a checkpoint holds of it."""
    return master_bytes(recipe) + state_bytes(recipe)


def recomputed_share(recompute: str | float) -> float:
    """The share of blocks that recompute; selective: all do, in part."""
    named = {"none": 0.0, "selective": 1.0, "full": 1.0}
    return named[recompute] if isinstance(recompute, str) else float(recompute)
