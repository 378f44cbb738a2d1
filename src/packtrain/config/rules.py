"""The one table of what cannot go together and what is unwise. Every face reads it; the trainer holds none of it."""

from __future__ import annotations

from collections.abc import Sequence

from packtrain.config.facts import Facts
from packtrain.config.host_rules import HOST_RULES
from packtrain.config.method_rules import METHOD_RULES, at_most, virtual_tokens
from packtrain.config.rule import SEVERITIES, Broken, Finding, Rule
from packtrain.config.schema import Recipe
from packtrain.config.zero_rules import ZERO_RULES


def _cuda_absent(recipe: Recipe, facts: Facts) -> Broken | None:
    """``cuda`` without a GPU."""
    if recipe.launch.device == "cuda" and facts.num_gpus == 0:
        return Broken("no GPU is visible to torch", "set launch.device to cpu, or install the CUDA build of torch")
    return None


def _processes(recipe: Recipe, facts: Facts) -> Broken | None:
    """More processes than GPUs."""
    if facts.device != "cuda" or facts.local_processes <= facts.num_gpus:
        return None
    what = f"{facts.local_processes} processes for {facts.num_gpus} GPUs"
    edits = {"launch.processes": facts.num_gpus}
    if recipe.launch.gpus == "auto":
        return Broken(what, f"set launch.processes to at most {facts.num_gpus}", edits)
    mend = f"set launch.processes and launch.gpus to at most {facts.num_gpus}"
    return Broken(what, mend, {**edits, "launch.gpus": facts.num_gpus})


def _gpus(recipe: Recipe, facts: Facts) -> Broken | None:
    """GPUs that are not there, are named twice, or are not as many as the processes."""
    gpus, processes = recipe.launch.gpus, recipe.launch.processes
    if gpus == "auto" or (gpus == 0 and facts.device == "cpu"):
        return None
    if facts.device == "cpu":
        edits = {"launch.gpus": None} if recipe.launch.device == "cpu" else {}
        return Broken(f"gpus {gpus} on a CPU", "leave it out, or set launch.device to cuda", edits)
    if isinstance(gpus, list) and (len(set(gpus)) < len(gpus) or max(gpus) >= facts.num_gpus):
        what = f"gpus {gpus} of {facts.num_gpus} visible ones"
        return Broken(what, f"choose different ones from 0 to {facts.num_gpus - 1}")
    number = recipe.launch.num_gpus
    if processes not in ("auto", number):
        mend = f"set launch.processes to {number}, or leave it out"
        return Broken(f"{number} GPUs for {processes} processes", mend, {"launch.processes": number})
    return None


def _single(recipe: Recipe, facts: Facts) -> Broken | None:
    """``single`` with several processes."""
    if recipe.parallel.strategy == "single" and facts.processes > 1:
        what = f"strategy single with {facts.processes} processes"
        mend = "set parallel.strategy to auto, ddp, fsdp or deepspeed, or launch.processes to 1"
        return Broken(what, mend, {"parallel.strategy": "auto"})
    return None


def _shard_size(recipe: Recipe, facts: Facts) -> Broken | None:
    """A shard size (HSDP) that does not divide the number of processes."""
    size = recipe.parallel.shard_size
    if size == "auto" or recipe.parallel.strategy not in ("auto", "fsdp"):
        return None
    if size > facts.processes or facts.processes % size:
        divisors = [n for n in range(1, facts.processes + 1) if facts.processes % n == 0]
        near = min(divisors, key=lambda n: (abs(n - size), -n))  # the larger of two: it needs less memory
        what = f"shard_size {size} does not divide {facts.processes} processes"
        return Broken(what, f"choose from {divisors}", {"parallel.shard_size": near})
    return None


def _shard_strategy(recipe: Recipe, facts: Facts) -> Broken | None:
    """A shard size without ``fsdp``."""
    if recipe.parallel.shard_size not in ("auto", 1) and recipe.parallel.strategy in ("single", "ddp", "deepspeed"):
        what = f"shard_size {recipe.parallel.shard_size} with strategy {recipe.parallel.strategy}"
        return Broken(what, "set parallel.strategy to fsdp", {"parallel.strategy": "fsdp"})
    return None


def _bf16_absent(recipe: Recipe, facts: Facts) -> Broken | None:
    """``bf16`` on a GPU without it."""
    if recipe.train.precision != "bf16" or facts.device != "cuda" or facts.bf16:
        return None
    scaled = recipe.parallel.strategy == "deepspeed" and recipe.parallel.zero_stage != 0
    mend = "set train.precision to fp32, or to fp16 with strategy deepspeed"
    return Broken("this GPU has no bf16", mend, {"train.precision": "fp16" if scaled else "fp32"})


def _bf16_slow(recipe: Recipe, facts: Facts) -> Broken | None:
    """``bf16`` on a CPU that computes it in software."""
    if recipe.train.precision != "bf16" or facts.device != "cpu" or facts.bf16:
        return None
    what = "this processor computes bf16 in software, slower than fp32"
    if recipe.train.master_weights == "bf16":  # half of the memory for the time: whoever asked for it may want that
        return Broken(what, "set train.precision and train.master_weights to fp32, for twice the memory")
    return Broken(what, "set train.precision to fp32", {"train.precision": "fp32"})


def _bf16_still(recipe: Recipe, facts: Facts) -> Broken | None:
    """Pure bf16 weights, rounded to nearest, at a learning rate below 1e-4."""
    rate = recipe.train.learning_rate
    if recipe.train.master_weights == "bf16" and recipe.train.rounding == "nearest" and rate < 1e-4:
        what = f"bf16 master weights do not move at learning rate {rate:g} when updates round to the nearest value"
        mend = "set train.rounding to stochastic or kahan, or train.master_weights to fp32"
        return Broken(what, mend, {"train.rounding": "stochastic"})
    return None


def _bf16_weights(recipe: Recipe, facts: Facts) -> Broken | None:
    """Pure bf16 weights with fp32 arithmetic."""
    precision = recipe.train.precision
    if precision == "auto":
        precision = "bf16" if facts.bf16 else "fp32"
    if recipe.train.master_weights == "bf16" and precision == "fp32":
        why = "" if recipe.train.precision == "fp32" else ", which auto chose for this processor"
        edits = {"train.precision": "bf16"} if facts.bf16 else {"train.master_weights": "fp32"}
        mend = "set train.precision to bf16, or master_weights to fp32"
        return Broken(f"bf16 weights with fp32 arithmetic{why}", mend, edits)
    return None


def _rounding(recipe: Recipe, facts: Facts) -> Broken | None:
    """``rounding`` with fp32 weights."""
    if recipe.train.rounding != "stochastic" and recipe.train.master_weights == "fp32":
        what = f"rounding {recipe.train.rounding} means nothing to fp32 weights"
        return Broken(what, "leave it out, or set train.master_weights to bf16", {"train.rounding": None})
    return None


def _offload_strategy(recipe: Recipe, facts: Facts) -> Broken | None:
    """Offload without ``fsdp`` or ``deepspeed``."""
    parallel = recipe.parallel
    if parallel.offload != "none" and parallel.strategy in ("single", "ddp"):
        mend = "set parallel.strategy to fsdp or deepspeed"
        what = f"offload {parallel.offload} with strategy {parallel.strategy}"
        return Broken(what, mend, {"parallel.strategy": "fsdp"})
    return None


def _offload_weights(recipe: Recipe, facts: Facts) -> Broken | None:
    """An offloaded optimizer with bf16 weights."""
    if recipe.parallel.offload == "optimizer" and recipe.train.master_weights == "bf16":
        what = "the offloaded optimizer works on fp32 weights in host memory"
        return Broken(what, "set train.master_weights to fp32", {"train.master_weights": "fp32"})
    return None


def _offload_activations(recipe: Recipe, facts: Facts) -> Broken | None:
    """Offload of activations where no block recomputes."""
    if recipe.parallel.offload_activations and recipe.parallel.recompute in ("none", 0.0):
        what = "offload_activations keeps the inputs of recomputed blocks, and none recomputes"
        return Broken(what, "set parallel.recompute to auto or full", {"parallel.recompute": "auto"})
    return None


def _micro_batch(recipe: Recipe, facts: Facts) -> Broken | None:
    """A micro-batch larger than the batch."""
    micro, batch = recipe.train.micro_batch_size, recipe.train.batch_size
    if micro != "auto" and micro > batch:
        what = f"micro-batches of {micro} rows in batches of {batch}"
        mend = "lower train.micro_batch_size or raise train.batch_size"
        return Broken(what, mend, {"train.micro_batch_size": batch})
    return None


def _batch_size(recipe: Recipe, facts: Facts) -> Broken | None:
    """A batch that the processes do not divide: some are idle in each step."""
    batch = recipe.train.batch_size
    if batch % facts.processes:
        whole = -(-batch // facts.processes) * facts.processes
        what = f"batches of {batch} rows on {facts.processes} processes leave some idle in each step"
        return Broken(what, f"set train.batch_size to {whole}", {"train.batch_size": whole})
    return None


def _too_long(recipe: Recipe, facts: Facts) -> Broken | None:
    """Rows past the model's positions, a prefix counted."""
    length, limit = recipe.data.max_length, facts.model.max_length
    if length == "auto" or limit is None:
        return None
    what = f"max_length {length} is past the {limit} positions of the model"
    if recipe.method.type == "prefix":
        what = f"max_length {length} and {virtual_tokens(recipe)} virtual tokens are past the {limit} positions of the"
        what, limit = f"{what} model", limit - virtual_tokens(recipe)
    if length > limit:
        shorter = at_most(recipe, limit)
        return Broken(what, shorter.mend, shorter.edits)
    return None


RULES: tuple[Rule, ...] = (
    *HOST_RULES,
    Rule("cuda-absent", "launch.device", "error", _cuda_absent, "no"),
    Rule("processes", "launch.processes", "error", _processes, "yes"),
    Rule("gpus", "launch.gpus", "error", _gpus, "sometimes"),
    Rule("single", "parallel.strategy", "error", _single, "yes"),
    Rule("shard-size", "parallel.shard_size", "error", _shard_size, "yes"),
    Rule("shard-strategy", "parallel.shard_size", "error", _shard_strategy, "yes"),
    Rule("bf16-absent", "train.precision", "error", _bf16_absent, "yes"),
    Rule("bf16-slow", "train.precision", "warning", _bf16_slow, "sometimes"),
    Rule("bf16-still", "train.master_weights", "warning", _bf16_still, "yes"),
    Rule("bf16-weights", "train.master_weights", "error", _bf16_weights, "yes"),
    Rule("rounding", "train.rounding", "warning", _rounding, "yes"),
    *METHOD_RULES,
    *ZERO_RULES,
    Rule("offload-strategy", "parallel.offload", "error", _offload_strategy, "yes"),
    Rule("offload-weights", "parallel.offload", "error", _offload_weights, "yes"),
    Rule("offload-activations", "parallel.offload_activations", "error", _offload_activations, "yes"),
    Rule("micro-batch", "train.micro_batch_size", "error", _micro_batch, "yes"),
    Rule("batch-size", "train.batch_size", "warning", _batch_size, "yes"),
    Rule("too-long", "data.max_length", "error", _too_long, "sometimes"),
)


def check(recipe: Recipe, facts: Facts, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Every rule that ``recipe`` breaks on this machine, errors first."""
    findings = []
    for rule in rules:
        broken = rule.check(recipe, facts)
        if broken is not None:
            findings.append(Finding(rule.id, rule.setting, rule.severity, broken.message, broken.mend, broken.edits))
    return worst_first(findings)


def worst_first(findings: list[Finding]) -> list[Finding]:
    """Errors, then warnings; each in the order given."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def first_error(recipe: Recipe, facts: Facts) -> Finding | None:
    """The first rule that keeps ``recipe`` from running on this machine."""
    return next((finding for finding in check(recipe, facts) if finding.severity == "error"), None)
