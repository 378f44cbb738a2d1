"""What DeepSpeed cannot do, and what does it instead: a part of the table in ``rules.py``."""

from __future__ import annotations

from packtrain.config.facts import Facts
from packtrain.config.resolve import zero_stage
from packtrain.config.rule import Broken, Edits, Rule
from packtrain.config.schema import Recipe


def _deepspeed_missing(recipe: Recipe, facts: Facts) -> Broken | None:
    """``deepspeed`` without the package."""
    if recipe.parallel.strategy == "deepspeed" and not facts.deepspeed:
        mend = "run `pip install 'packtrain[deepspeed]'`, or choose fsdp"
        return Broken("the package deepspeed is not installed", mend)
    return None


def _deepspeed_unused(recipe: Recipe, facts: Facts) -> Broken | None:
    """DeepSpeed's settings with another strategy."""
    parallel = recipe.parallel
    if parallel.strategy == "deepspeed":
        return None
    given = {"zero_stage": parallel.zero_stage not in ("auto", 0), "deepspeed_config": parallel.deepspeed_config,
             "offload_dir": parallel.offload_dir}  # fmt: skip
    for name, value in given.items():
        if value:
            what = f"{name} means nothing to strategy {parallel.strategy}"
            mend, deepspeed = "set parallel.strategy to deepspeed", {"parallel.strategy": "deepspeed"}
            if parallel.offload != "none" and parallel.strategy in ("single", "ddp"):
                return Broken(what, mend, deepspeed)
            meant = parallel.strategy == "auto" and facts.deepspeed
            return Broken(what, f"{mend}, or leave it out", deepspeed if meant else {f"parallel.{name}": None})
    return None


def _zero_offload(recipe: Recipe, facts: Facts) -> Broken | None:
    """Offload at a ZeRO stage that keeps whole what it would move."""
    parallel = recipe.parallel
    if parallel.strategy != "deepspeed" or parallel.offload == "none":
        return None
    stage = zero_stage(recipe, facts)
    if stage == 0:
        either = parallel.offload == "optimizer" and not parallel.offload_dir
        mend = f"set parallel.zero_stage to {'2 or 3' if either else '3'}"
        what = f"offload {parallel.offload} with ZeRO-0, which shards nothing"
        return Broken(what, mend, _stage(2 if either else 3))
    if stage < 3 and parallel.offload == "params":
        what = f"offload params with ZeRO-{stage}, which keeps them whole"
        return Broken(what, "set parallel.zero_stage to 3", _stage(3))
    return None


def _stage(stage: int) -> Edits:
    return {"parallel.zero_stage": stage}


def _zero_disk(recipe: Recipe, facts: Facts) -> Broken | None:
    """A folder to swap to that nothing is swapped to, or that loses gradients."""
    parallel = recipe.parallel
    if parallel.strategy != "deepspeed" or parallel.offload_dir is None:
        return None
    if parallel.offload == "none":
        mend = "set parallel.offload to optimizer or params"
        return Broken("a folder to swap to, and nothing is offloaded", mend, {"parallel.offload": "optimizer"})
    if zero_stage(recipe, facts) < 3:
        what = f"ZeRO-{zero_stage(recipe, facts)} never swaps to a disk"
        return Broken(what, "set parallel.zero_stage to 3, or leave offload_dir out", _stage(3))
    own = parallel.deepspeed_config
    given = own.get("zero_optimization", {}).get("sub_group_size", 1) if isinstance(own, dict) else 1
    if given != 1:
        what = f"DeepSpeed loses gradients in silence when it swaps sub-groups of {given:g} elements"
        mend = "remove sub_group_size from parallel.deepspeed_config"
        return Broken(what, mend, {"parallel.deepspeed_config.zero_optimization.sub_group_size": None})
    return None


def _zero_experts(recipe: Recipe, facts: Facts) -> Broken | None:
    """ZeRO-3 of a mixture of experts."""
    parallel = recipe.parallel
    if parallel.strategy != "deepspeed" or not facts.model.num_experts or zero_stage(recipe, facts) != 3:
        return None
    what = f"ZeRO-3 with {facts.model.num_experts} experts a block, of which ranks choose different ones"
    only_at_3 = parallel.offload == "params" or parallel.offload_dir
    edits: Edits = {"parallel.strategy": "fsdp"} if only_at_3 else _stage(2)
    return Broken(what, "set parallel.zero_stage to 2, or parallel.strategy to fsdp", edits)


def _zero_optimizer(recipe: Recipe, facts: Facts) -> Broken | None:
    """DeepSpeed with 8-bit or bf16 optimizer states, or bf16 weights."""
    train = recipe.train
    if recipe.parallel.strategy != "deepspeed":
        return None
    if train.optimizer != "adamw":
        what = f"optimizer {train.optimizer} with DeepSpeed, whose states are fp32"
        return Broken(what, "set train.optimizer to adamw", {"train.optimizer": "adamw"})
    if train.master_weights != "fp32":
        what = "bf16 master weights with DeepSpeed, which keeps fp32"
        return Broken(what, "set train.master_weights to fp32", {"train.master_weights": "fp32"})
    return None


def _zero_compile(recipe: Recipe, facts: Facts) -> Broken | None:
    """ZeRO-3 with compiled blocks."""
    parallel = recipe.parallel
    if parallel.strategy == "deepspeed" and parallel.compile is True and zero_stage(recipe, facts) == 3:
        what = "ZeRO-3 fetches parameters inside of blocks, a compiled one cannot"
        return Broken(what, "set parallel.compile to auto", {"parallel.compile": "auto"})
    return None


def _fp16(recipe: Recipe, facts: Facts) -> Broken | None:
    """``fp16`` without DeepSpeed's loss scaling, or on a CPU."""
    if recipe.train.precision != "fp16":
        return None
    wide: Edits = {"train.precision": "bf16" if facts.bf16 else "fp32"}
    if recipe.parallel.strategy != "deepspeed":
        what = "fp16 needs the loss scaling of strategy deepspeed"
        return Broken(what, "set train.precision to bf16 or fp32", wide)
    if zero_stage(recipe, facts) == 0:
        mend = "set parallel.zero_stage to 1, or train.precision to bf16"
        return Broken("ZeRO-0 does not scale fp16's loss", mend, wide if facts.bf16 else _stage(1))
    if facts.device == "cpu":
        return Broken("fp16 on a CPU", "set train.precision to fp32", {"train.precision": "fp32"})
    return None


ZERO_RULES: tuple[Rule, ...] = (
    Rule("deepspeed-missing", "parallel.strategy", "error", _deepspeed_missing, "no"),
    Rule("deepspeed-unused", "parallel.strategy", "error", _deepspeed_unused, "yes"),
    Rule("zero-offload", "parallel.offload", "error", _zero_offload, "yes"),
    Rule("zero-disk", "parallel.offload_dir", "error", _zero_disk, "yes"),
    Rule("zero-experts", "parallel.zero_stage", "error", _zero_experts, "yes"),
    Rule("zero-optimizer", "train.optimizer", "error", _zero_optimizer, "yes"),
    Rule("zero-compile", "parallel.compile", "error", _zero_compile, "yes"),
    Rule("fp16", "train.precision", "error", _fp16, "yes"),
)
