"""The one table of what cannot go together and what is unwise. Every face reads it; the trainer holds none of it."""

from __future__ import annotations

from packtrain.config.facts import Facts
from packtrain.config.rule import Broken, Finding, Rule
from packtrain.config.schema import Recipe
from packtrain.config.zero_rules import ZERO_RULES


def _cuda_absent(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.launch.device == "cuda" and facts.num_gpus == 0:
        return "no GPU is visible to torch", "set launch.device to cpu, or install the CUDA build of torch"
    return None


def _too_many_processes(recipe: Recipe, facts: Facts) -> Broken:
    if facts.device == "cuda" and facts.local_processes > facts.num_gpus:
        return (
            f"{facts.local_processes} processes for {facts.num_gpus} GPUs",
            f"set launch.processes to at most {facts.num_gpus}",
        )
    return None


def _gpus(recipe: Recipe, facts: Facts) -> Broken:
    gpus, processes = recipe.launch.gpus, recipe.launch.processes
    if gpus == "auto" or (gpus == 0 and facts.device == "cpu"):
        return None
    if facts.device == "cpu":
        return f"gpus {gpus} on a CPU", "leave it out, or set launch.device to cuda"
    if isinstance(gpus, list) and (len(set(gpus)) < len(gpus) or max(gpus) >= facts.num_gpus):
        return f"gpus {gpus} of {facts.num_gpus} visible ones", f"choose different ones from 0 to {facts.num_gpus - 1}"
    number = recipe.launch.num_gpus
    if processes not in ("auto", number):
        return f"{number} GPUs for {processes} processes", f"set launch.processes to {number}, or leave it out"
    return None


def _single_needs_one(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.parallel.strategy == "single" and facts.processes > 1:
        what = f"strategy single with {facts.processes} processes"
        return what, "choose ddp, fsdp or deepspeed, or launch.processes=1"
    return None


def _shard_size_divides(recipe: Recipe, facts: Facts) -> Broken:
    size = recipe.parallel.shard_size
    if size == "auto" or recipe.parallel.strategy not in ("auto", "fsdp"):
        return None
    if size > facts.processes or facts.processes % size:
        divisors = [n for n in range(1, facts.processes + 1) if facts.processes % n == 0]
        return f"shard_size {size} does not divide {facts.processes} processes", f"choose from {divisors}"
    return None


def _shard_size_needs_fsdp(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.parallel.shard_size not in ("auto", 1) and recipe.parallel.strategy in ("single", "ddp", "deepspeed"):
        return (
            f"shard_size {recipe.parallel.shard_size} with strategy {recipe.parallel.strategy}",
            "set parallel.strategy to fsdp",
        )
    return None


def _bf16_absent(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.train.precision == "bf16" and facts.device == "cuda" and not facts.bf16:
        return "this GPU has no bf16", "set train.precision to fp32, or to fp16 with strategy deepspeed"
    return None


def _bf16_slow(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.train.precision == "bf16" and facts.device == "cpu" and not facts.bf16:
        return "this processor computes bf16 in software, slower than fp32", "set train.precision to fp32"
    return None


def _pure_bf16(recipe: Recipe, facts: Facts) -> Broken:
    rate = recipe.train.learning_rate
    if recipe.train.master_weights == "bf16" and recipe.train.rounding == "nearest" and rate < 1e-4:
        return (
            f"bf16 master weights do not move at learning rate {rate:g} when updates are rounded to the nearest value",
            "set train.rounding to stochastic or kahan, or train.master_weights to fp32",
        )
    return None


def _freeze_what(recipe: Recipe, facts: Facts) -> Broken:
    method = recipe.method
    if method.type == "freeze" and not method.freeze_first and not method.trainable:
        return "method freeze names nothing", "give method.freeze_first or method.trainable"
    if method.type == "freeze" and method.freeze_first and method.trainable:
        return "both freeze_first and trainable are given", "give one of them"
    return None


_LORA = {"rank", "alpha", "dropout", "targets", "rslora", "dora", "lora_plus", "start", "also_train"}
_USED: dict[str, set[str]] = {
    "full": set(),
    "freeze": {"freeze_first", "trainable"},
    "lora": _LORA,
    "qlora": _LORA | {"quantize", "double_quant"},
    "llama_adapter": {"virtual_tokens", "adapter_blocks", "also_train"},
    "prefix": {"virtual_tokens", "also_train"},
}


def _method_unused(recipe: Recipe, facts: Facts) -> Broken:
    method = recipe.method
    # What `auto` becomes is not given by anybody: it is in the recipe of a run that another one starts from.
    automatic = {"virtual_tokens": (10, 30), "adapter_blocks": (min(30, facts.model.num_blocks),)}
    unused = [
        name
        for name, value in method.model_dump(exclude_defaults=True).items()
        if name not in {"type", *_USED[method.type]} and value not in automatic.get(name, ())
    ]
    if unused:
        verb = "mean" if len(unused) > 1 else "means"
        return (
            f"{' and '.join(unused)} {verb} nothing to method {method.type}",
            "leave it out, or choose another method",
        )
    return None


def _rounding_unused(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.train.rounding != "stochastic" and recipe.train.master_weights == "fp32":
        return f"rounding {recipe.train.rounding} means nothing to fp32 weights", "set train.master_weights to bf16"
    return None


def _bf16_weights_in_fp32(recipe: Recipe, facts: Facts) -> Broken:
    precision = recipe.train.precision
    if precision == "auto":
        precision = "bf16" if facts.bf16 else "fp32"
    if recipe.train.master_weights == "bf16" and precision == "fp32":
        why = "" if recipe.train.precision == "fp32" else ", which auto chose for this processor"
        return f"bf16 weights with fp32 arithmetic{why}", "set train.precision to bf16, or master_weights to fp32"
    return None


def _freeze_first_too_many(recipe: Recipe, facts: Facts) -> Broken:
    count, blocks = recipe.method.freeze_first, facts.model.num_blocks
    if recipe.method.type == "freeze" and count > blocks:
        return f"{count} of {blocks} blocks", f"give 1 to {blocks}, or name method.trainable"
    return None


def _adapter_blocks_too_many(recipe: Recipe, facts: Facts) -> Broken:
    count, blocks = recipe.method.adapter_blocks, facts.model.num_blocks
    if recipe.method.type == "llama_adapter" and count != "auto" and count > blocks:
        return f"{count} of {blocks} blocks", f"give 1 to {blocks}"
    return None


def _pissa_dora(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.method.is_lora and recipe.method.start == "pissa" and recipe.method.dora:
        return "DoRA's magnitudes have no PiSSA start", "set method.dora to false or method.start to default"
    return None


def _llama_adapter(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.method.type != "llama_adapter":
        return None
    if facts.model.type not in ("llama", "mistral"):
        return f"peft has no llama_adapter for {facts.model.type} models", "set method.type to lora or prefix"
    if not facts.model.even_heads:
        return (
            "llama_adapter needs a hidden size of heads x head size, which this model lacks",
            "set method.type to lora",
        )
    return None


def _prefix_window(recipe: Recipe, facts: Facts) -> Broken:
    window, length = facts.model.sliding_window, recipe.data.max_length
    if recipe.method.type != "prefix" or window is None:
        return None
    limit = window - _virtual_tokens(recipe)
    if length == "auto" or length > limit:
        what = f"rows of {length} tokens push the prefix out of the model's sliding window of {window}"
        return what, _shorter(limit) + ", or method.type to lora"
    return None


def _virtual_tokens(recipe: Recipe) -> int:
    tokens = recipe.method.virtual_tokens
    return 30 if tokens == "auto" else tokens


def _shorter(limit: int) -> str:
    """The mend where rows of up to ``limit`` tokens fit beside a prefix."""
    if limit < 8:
        return "lower method.virtual_tokens"
    return f"set data.max_length to at most {limit}"


def _also_train_unused(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.method.also_train and not recipe.method.is_adapter:
        mend = "name the parts in method.trainable" if recipe.method.type == "freeze" else "leave it out"
        return f"also_train means nothing to method {recipe.method.type}", mend
    return None


def _offload_needs_fsdp(recipe: Recipe, facts: Facts) -> Broken:
    parallel = recipe.parallel
    if parallel.offload != "none" and parallel.strategy in ("single", "ddp"):
        mend = "set parallel.strategy to fsdp or deepspeed"
        return f"offload {parallel.offload} with strategy {parallel.strategy}", mend
    return None


def _offload_bf16(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.parallel.offload == "optimizer" and recipe.train.master_weights == "bf16":
        return "the offloaded optimizer works on fp32 weights in host memory", "set train.master_weights to fp32"
    return None


def _offload_activations(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.parallel.offload_activations and recipe.parallel.recompute in ("none", 0.0):
        return (
            "offload_activations keeps the inputs of recomputed blocks, and none recomputes",
            "set parallel.recompute to auto or full",
        )
    return None


def _quantize_unused(recipe: Recipe, facts: Facts) -> Broken:
    method = recipe.method
    if method.type != "qlora" and (method.double_quant or method.quantize != "nf4"):
        return f"quantize and double_quant mean nothing to method {method.type}", "set method.type to qlora"
    return None


def _micro_batch(recipe: Recipe, facts: Facts) -> Broken:
    micro, batch = recipe.train.micro_batch_size, recipe.train.batch_size
    if micro != "auto" and micro > batch:
        return (
            f"micro-batches of {micro} rows in batches of {batch}",
            "lower train.micro_batch_size or raise train.batch_size",
        )
    return None


def _idle_ranks(recipe: Recipe, facts: Facts) -> Broken:
    batch = recipe.train.batch_size
    if batch % facts.processes:
        whole = -(-batch // facts.processes) * facts.processes
        return (
            f"batches of {batch} rows on {facts.processes} processes leave some idle in each step",
            f"set train.batch_size to {whole}",
        )
    return None


def _too_long(recipe: Recipe, facts: Facts) -> Broken:
    length, limit = recipe.data.max_length, facts.model.max_length
    if length == "auto" or limit is None:
        return None
    if recipe.method.type == "prefix" and length > limit - _virtual_tokens(recipe):
        what = f"max_length {length} and {_virtual_tokens(recipe)} virtual tokens are past the {limit} positions"
        return f"{what} of the model", _shorter(limit - _virtual_tokens(recipe))
    if length > limit:
        return f"max_length {length} is past the {limit} positions of the model", _shorter(limit)
    return None


RULES: tuple[Rule, ...] = (
    Rule("launch.device", "error", _cuda_absent),
    Rule("launch.processes", "error", _too_many_processes),
    Rule("launch.gpus", "error", _gpus),
    Rule("parallel.strategy", "error", _single_needs_one),
    Rule("parallel.shard_size", "error", _shard_size_divides),
    Rule("parallel.shard_size", "error", _shard_size_needs_fsdp),
    Rule("train.precision", "error", _bf16_absent),
    Rule("train.precision", "warning", _bf16_slow),
    Rule("train.master_weights", "warning", _pure_bf16),
    Rule("method.freeze_first", "error", _freeze_what),
    Rule("method.freeze_first", "error", _freeze_first_too_many),
    Rule("method.adapter_blocks", "error", _adapter_blocks_too_many),
    Rule("method.start", "error", _pissa_dora),
    Rule("method.type", "error", _llama_adapter),
    Rule("method.type", "error", _prefix_window),
    Rule("method.also_train", "error", _also_train_unused),
    Rule("method.quantize", "error", _quantize_unused),
    Rule("method", "warning", _method_unused),
    Rule("train.rounding", "warning", _rounding_unused),
    Rule("train.master_weights", "error", _bf16_weights_in_fp32),
    *ZERO_RULES,
    Rule("parallel.offload", "error", _offload_needs_fsdp),
    Rule("parallel.offload", "error", _offload_bf16),
    Rule("parallel.offload_activations", "error", _offload_activations),
    Rule("train.micro_batch_size", "error", _micro_batch),
    Rule("train.batch_size", "warning", _idle_ranks),
    Rule("data.max_length", "error", _too_long),
)


def check(recipe: Recipe, facts: Facts) -> list[Finding]:
    """Every rule that ``recipe`` breaks on this machine, errors first."""
    findings = []
    for rule in RULES:
        broken = rule.check(recipe, facts)
        if broken is not None:
            findings.append(Finding(rule.id, rule.severity, *broken))
    return sorted(findings, key=lambda f: f.severity != "error")


def first_error(recipe: Recipe, facts: Facts) -> Finding | None:
    """The first rule that keeps ``recipe`` from running on this machine."""
    return next((finding for finding in check(recipe, facts) if finding.severity == "error"), None)
