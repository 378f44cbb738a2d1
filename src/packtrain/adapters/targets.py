"""Which linear modules get an adapter."""

from __future__ import annotations

from torch import nn

from packtrain.errors import UserError, listed, nearest
from packtrain.models.plan import ModelPlan


def find_targets(model: nn.Module, plan: ModelPlan, wanted: str | list[str]) -> list[str]:
    """Full names of the linear modules that ``method.targets`` means.

    Args:
        wanted: ``all_linear`` (every linear inside the blocks), or names: the last part of a module's name
            (``q_proj``) or a longer tail of it (``mlp.down_proj``).

    Raises:
        UserError: a name matches no linear module, or the head.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    in_blocks = [name for name in linear if name.startswith(plan.blocks + ".")]
    if wanted == "all_linear":
        return in_blocks
    found: list[str] = []
    for tail in wanted:
        matches = [name for name in linear if name == tail or name.endswith("." + tail)]
        if not matches:
            names = sorted({name.rsplit(".", 1)[-1] for name in linear})
            guess = nearest(tail, names)
            mend = f"did you mean '{guess}'" if guess else f"choose from {listed(names)}"
            raise UserError("method.targets", f"no linear module is called '{tail}'", mend)
        found += matches
    if plan.head in found:
        why = "shares its weight with the embedding" if plan.tied else "is applied to labelled positions only"
        raise UserError(
            "method.targets",
            f"'{plan.head}' {why} and takes no adapter",
            "leave it out, or train it whole with method.also_train: [head]",
        )
    return list(dict.fromkeys(found))
