"""What DeepSpeed cannot do, and what does it instead: a part of the table in ``rules.py``."""

from __future__ import annotations

from packtrain.config.facts import Facts
from packtrain.config.resolve import zero_stage
from packtrain.config.rule import Broken, Rule
from packtrain.config.schema import Recipe


def _deepspeed_missing(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.parallel.strategy == "deepspeed" and not facts.deepspeed:
        return "the package deepspeed is not installed", "run `pip install 'packtrain[deepspeed]'`, or choose fsdp"
    return None


def _deepspeed_unused(recipe: Recipe, facts: Facts) -> Broken:
    parallel = recipe.parallel
    if parallel.strategy == "deepspeed":
        return None
    given = {"zero_stage": parallel.zero_stage not in ("auto", 0), "deepspeed_config": parallel.deepspeed_config,
             "offload_dir": parallel.offload_dir}  # fmt: skip
    for name, value in given.items():
        if value:
            what = f"{name} means nothing to strategy {parallel.strategy}"
            alone = parallel.offload != "none" and parallel.strategy in ("single", "ddp")
            return what, "set parallel.strategy to deepspeed" + ("" if alone else ", or leave it out")
    return None


def _zero_offload(recipe: Recipe, facts: Facts) -> Broken:
    parallel = recipe.parallel
    if parallel.strategy != "deepspeed" or parallel.offload == "none":
        return None
    stage = zero_stage(recipe, facts)
    if stage == 0:
        either = parallel.offload == "optimizer" and not parallel.offload_dir
        mend = f"set parallel.zero_stage to {'2 or 3' if either else '3'}"
        return f"offload {parallel.offload} with ZeRO-0, which shards nothing", mend
    if stage < 3 and parallel.offload == "params":
        return f"offload params with ZeRO-{stage}, which keeps them whole", "set parallel.zero_stage to 3"
    return None


def _zero_disk(recipe: Recipe, facts: Facts) -> Broken:
    parallel = recipe.parallel
    if parallel.strategy != "deepspeed" or parallel.offload_dir is None:
        return None
    if parallel.offload == "none":
        return "a folder to swap to, and nothing is offloaded", "set parallel.offload to optimizer or params"
    if zero_stage(recipe, facts) < 3:
        what = f"ZeRO-{zero_stage(recipe, facts)} never swaps to a disk"
        return what, "set parallel.zero_stage to 3, or leave offload_dir out"
    own = parallel.deepspeed_config
    given = own.get("zero_optimization", {}).get("sub_group_size", 1) if isinstance(own, dict) else 1
    if given != 1:
        what = f"DeepSpeed loses gradients in silence when it swaps sub-groups of {given:g} elements"
        return what, "remove sub_group_size from parallel.deepspeed_config"
    return None


def _zero_experts(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.parallel.strategy == "deepspeed" and facts.model.num_experts and zero_stage(recipe, facts) == 3:
        what = f"ZeRO-3 with {facts.model.num_experts} experts a block, of which ranks choose different ones"
        return what, "set parallel.zero_stage to 2, or parallel.strategy to fsdp"
    return None


def _zero_optimizer(recipe: Recipe, facts: Facts) -> Broken:
    train = recipe.train
    if recipe.parallel.strategy != "deepspeed":
        return None
    if train.optimizer != "adamw":
        return f"optimizer {train.optimizer} with DeepSpeed, whose states are fp32", "set train.optimizer to adamw"
    if train.master_weights != "fp32":
        return "bf16 master weights with DeepSpeed, which keeps fp32", "set train.master_weights to fp32"
    return None


def _zero_compile(recipe: Recipe, facts: Facts) -> Broken:
    parallel = recipe.parallel
    if parallel.strategy == "deepspeed" and parallel.compile is True and zero_stage(recipe, facts) == 3:
        return "ZeRO-3 fetches parameters inside of blocks, a compiled one cannot", "set parallel.compile to auto"
    return None


def _fp16(recipe: Recipe, facts: Facts) -> Broken:
    if recipe.train.precision != "fp16":
        return None
    if recipe.parallel.strategy != "deepspeed":
        return "fp16 needs the loss scaling of strategy deepspeed", "set train.precision to bf16 or fp32"
    if zero_stage(recipe, facts) == 0:
        return "ZeRO-0 does not scale fp16's loss", "set parallel.zero_stage to 1, or train.precision to bf16"
    if facts.device == "cpu":
        return "fp16 on a CPU", "set train.precision to fp32"
    return None


ZERO_RULES: tuple[Rule, ...] = (
    Rule("parallel.strategy", "error", _deepspeed_missing),
    Rule("parallel.strategy", "error", _deepspeed_unused),
    Rule("parallel.offload", "error", _zero_offload),
    Rule("parallel.offload_dir", "error", _zero_disk),
    Rule("parallel.zero_stage", "error", _zero_experts),
    Rule("train.optimizer", "error", _zero_optimizer),
    Rule("parallel.compile", "error", _zero_compile),
    Rule("train.precision", "error", _fp16),
)
