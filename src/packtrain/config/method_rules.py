"""What a method cannot do: a part of the table in ``rules.py``."""

from __future__ import annotations

from packtrain.config.blocks import block_fault
from packtrain.config.facts import Facts
from packtrain.config.rule import Broken, Rule
from packtrain.config.schema import MIN_LENGTH, Recipe
from packtrain.errors import nearest


def _freeze_what(recipe: Recipe, facts: Facts) -> Broken | None:
    """``freeze`` that names nothing to train, or names it in both ways."""
    method = recipe.method
    if method.type == "freeze" and not method.freeze_first and not method.trainable:
        return Broken("method freeze names nothing", "give method.freeze_first or method.trainable")
    if method.type == "freeze" and method.freeze_first and method.trainable:
        return Broken("both freeze_first and trainable are given", "give one of them")
    return None


def _freeze_too_many(recipe: Recipe, facts: Facts) -> Broken | None:
    """``freeze_first`` above the model's number of blocks."""
    count, blocks = recipe.method.freeze_first, facts.model.num_blocks
    if recipe.method.type == "freeze" and count > blocks:
        return Broken(f"{count} of {blocks} blocks", f"give 1 to {blocks}, or name method.trainable")
    return None


def _trainable(recipe: Recipe, facts: Facts) -> Broken | None:
    """``trainable`` that names what the model does not have."""
    for name in recipe.method.trainable if recipe.method.type == "freeze" else ():
        if name in ("embedding", "norm", "head"):
            continue
        if fault := block_fault(name, facts.model.num_blocks):
            return Broken(*fault)
    return None


def _targets(recipe: Recipe, facts: Facts) -> Broken | None:
    """``targets`` that names no linear of a block."""
    targets, linears = recipe.method.targets, [linear.name for linear in facts.model.linears]
    if not recipe.method.is_lora or targets == "all_linear" or not linears:
        return None
    for tail in targets:
        # A longer tail may name one block's linear: `layers.0.mlp.down_proj`.
        if any(f".{name}".endswith(f".{tail}") or tail.endswith(f".{name}") for name in linears):
            continue
        names = sorted({name.rpartition(".")[2] for name in linears})
        guess = nearest(tail, names)
        mend = f"choose from {', '.join(names)}, or train the head whole with method.also_train: [head]"
        return Broken(f"no linear module of a block is called '{tail}'", f"did you mean '{guess}'" if guess else mend)
    return None


def _adapter_blocks(recipe: Recipe, facts: Facts) -> Broken | None:
    """``adapter_blocks`` above the model's number of blocks."""
    count, blocks = recipe.method.adapter_blocks, facts.model.num_blocks
    if recipe.method.type == "llama_adapter" and count != "auto" and count > blocks:
        return Broken(f"{count} of {blocks} blocks", f"give 1 to {blocks}", {"method.adapter_blocks": blocks})
    return None


def _pissa_dora(recipe: Recipe, facts: Facts) -> Broken | None:
    """A PiSSA start of DoRA."""
    if recipe.method.is_lora and recipe.method.start == "pissa" and recipe.method.dora:
        return Broken("DoRA's magnitudes have no PiSSA start", "set method.dora to false or method.start to default")
    return None


def _llama_adapter(recipe: Recipe, facts: Facts) -> Broken | None:
    """``llama_adapter`` on a model that peft does not have it for."""
    if recipe.method.type != "llama_adapter":
        return None
    if facts.model.type not in ("llama", "mistral"):
        return Broken(f"peft has no llama_adapter for {facts.model.type} models", "set method.type to lora or prefix")
    if not facts.model.even_heads:
        what = "llama_adapter needs a hidden size of heads x head size, which this model lacks"
        return Broken(what, "set method.type to lora", {"method.type": "lora"})
    return None


def _prefix_window(recipe: Recipe, facts: Facts) -> Broken | None:
    """Rows that push a prefix out of the model's sliding window."""
    window, length = facts.model.sliding_window, recipe.data.max_length
    if recipe.method.type != "prefix" or window is None:
        return None
    limit = window - virtual_tokens(recipe)
    if length == "auto" or length > limit:
        what = f"rows of {length} tokens push the prefix out of the model's sliding window of {window}"
        shorter = at_most(recipe, limit)
        return Broken(what, f"{shorter.mend}, or method.type to lora", shorter.edits)
    return None


def virtual_tokens(recipe: Recipe) -> int:
    """The length of a prefix."""
    tokens = recipe.method.virtual_tokens
    return 30 if tokens == "auto" else tokens


def at_most(recipe: Recipe, limit: int) -> Broken:
    """The mend where rows of up to ``limit`` tokens fit, beside a prefix if there is one."""
    if limit < MIN_LENGTH:
        prefix = recipe.method.type == "prefix"
        return Broken("", "lower method.virtual_tokens" if prefix else "choose a model of more positions")
    return Broken("", f"set data.max_length to at most {limit}", {"data.max_length": limit})


def _also_train(recipe: Recipe, facts: Facts) -> Broken | None:
    """``also_train`` with a method that is no adapter."""
    if not recipe.method.also_train or recipe.method.is_adapter:
        return None
    what = f"also_train means nothing to method {recipe.method.type}"
    if recipe.method.type == "freeze":
        return Broken(what, "name the parts in method.trainable")
    return Broken(what, "leave it out", {"method.also_train": None})


def _quantize(recipe: Recipe, facts: Facts) -> Broken | None:
    """``quantize`` or ``double_quant`` with another method than qlora."""
    method = recipe.method
    if method.type == "qlora" or not (method.double_quant or method.quantize != "nf4"):
        return None
    what = f"quantize and double_quant mean nothing to method {method.type}"
    if method.type == "lora":
        return Broken(what, "set method.type to qlora", {"method.type": "qlora"})
    left_out = {"method.quantize": None, "method.double_quant": None}
    return Broken(what, "leave them out, or set method.type to qlora", left_out)


_LORA = {"rank", "alpha", "dropout", "targets", "rslora", "dora", "lora_plus", "start", "also_train"}
_USED: dict[str, set[str]] = {
    "full": set(),
    "freeze": {"freeze_first", "trainable"},
    "lora": _LORA,
    "qlora": _LORA | {"quantize", "double_quant"},
    "llama_adapter": {"virtual_tokens", "adapter_blocks", "also_train"},
    "prefix": {"virtual_tokens", "also_train"},
}


def _unused(recipe: Recipe, facts: Facts) -> Broken | None:
    """Settings that mean nothing to the method."""
    method = recipe.method
    # What `auto` becomes is not given by anybody: it is in the recipe of a run that another one starts from.
    automatic = {"virtual_tokens": (10, 30), "adapter_blocks": (min(30, facts.model.num_blocks),)}
    unused = [
        name
        for name, value in method.model_dump(exclude_defaults=True).items()
        if name not in {"type", *_USED[method.type]} and value not in automatic.get(name, ())
    ]
    if not unused:
        return None
    what = f"{' and '.join(unused)} {'mean' if len(unused) > 1 else 'means'} nothing to method {method.type}"
    return Broken(what, "leave it out, or choose another method", {f"method.{name}": None for name in unused})


METHOD_RULES: tuple[Rule, ...] = (
    Rule("freeze-what", "method.freeze_first", "error", _freeze_what, "no"),
    Rule("freeze-too-many", "method.freeze_first", "error", _freeze_too_many, "no"),
    Rule("trainable", "method.trainable", "error", _trainable, "no"),
    Rule("targets", "method.targets", "error", _targets, "no"),
    Rule("adapter-blocks", "method.adapter_blocks", "error", _adapter_blocks, "yes"),
    Rule("pissa-dora", "method.start", "error", _pissa_dora, "no"),
    Rule("llama-adapter", "method.type", "error", _llama_adapter, "sometimes"),
    Rule("prefix-window", "method.type", "error", _prefix_window, "sometimes"),
    Rule("also-train", "method.also_train", "error", _also_train, "sometimes"),
    Rule("quantize", "method.quantize", "error", _quantize, "yes"),
    Rule("method-unused", "method", "warning", _unused, "yes"),
)
