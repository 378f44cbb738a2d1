"""A recipe with some of its settings changed, as a mend names them."""

from __future__ import annotations

from typing import Any

from packtrain.config.load import build_recipe
from packtrain.config.rule import Edits
from packtrain.config.schema import Recipe


def with_edits(recipe: Recipe, edits: Edits) -> Recipe:
    """A copy of ``recipe`` in which each dotted key has its new value, or its default where that is None.

    Raises:
        UserError: a value is not allowed.
    """
    values = recipe.model_dump(exclude_unset=True)
    for key, value in edits.items():
        *sections, name = key.split(".")
        node: dict[str, Any] = values
        for section in sections:
            node = node.setdefault(section, {})
        if value is None:
            node.pop(name, None)
        else:
            node[name] = value
    return build_recipe(values)
