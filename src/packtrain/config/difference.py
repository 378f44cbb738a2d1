"""Where recipes differ, setting by setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packtrain.config.schema import Recipe

_NEVER_ALIKE = "output.name"


@dataclass(frozen=True)
class Setting:
    """A setting that is not the same in all of some recipes: its dotted key, and its value in each of them."""

    key: str
    values: tuple[Any, ...]

    @property
    def shown(self) -> list[str]:
        """The values as a recipe would have them."""
        return [readable(value) for value in self.values]

    @property
    def change(self) -> str:
        """``train.learning_rate: 0.0001 -> 5e-05``."""
        return f"{self.key}: {' -> '.join(self.shown)}"


def difference(recipes: Sequence[Recipe]) -> list[Setting]:
    """The settings in which recipes differ, in the schema's order; the run's name aside."""
    flat = [dict(_flat(recipe.model_dump(mode="json"))) for recipe in recipes]
    keys = dict.fromkeys(key for values in flat for key in values)
    found = [Setting(key, tuple(values.get(key) for values in flat)) for key in keys if key != _NEVER_ALIKE]
    return [setting for setting in found if any(value != setting.values[0] for value in setting.values[1:])]


def readable(value: Any) -> str:
    """A setting's value in one short line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(readable, value))}]"
    if isinstance(value, dict):
        given = {key: readable(item) for key, item in value.items() if item not in (None, "auto", 1.0)}
        given = {key: text for key, text in given.items() if text != "{}"}
        if list(given) == ["path"]:
            return given["path"]
        return f"{{{', '.join(f'{key}: {text}' for key, text in given.items())}}}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and values; a list is one value."""
    found = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found
