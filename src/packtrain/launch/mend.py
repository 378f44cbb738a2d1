"""``packtrain doctor --fix``: the mends of what was found, written into the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from packtrain.config import Recipe, load_recipe
from packtrain.config.edits import with_edits
from packtrain.config.load import parse_recipe
from packtrain.config.rule import Finding
from packtrain.errors import UserError
from packtrain.launch.doctor import Look
from packtrain.launch.recipe_edits import edited, read_exactly, replace_recipe
from packtrain.launch.start import adopted

ROUNDS = 50
"""Mends, one after the other; no recipe needs so many."""


@dataclass(frozen=True)
class Mended:
    """A recipe's text before and after, and what was mended, in order."""

    path: Path
    before: str
    after: str
    findings: list[Finding]

    @property
    def difference(self) -> str:
        """A unified diff; empty where nothing changed."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(unified_diff(before, after, f"{self.path} (as it was)", str(self.path)))

    def write(self) -> None:
        """Replace the file, at once.

        Raises:
            UserError: it has changed in the meantime, or cannot be written.
        """
        if self.after != self.before:
            replace_recipe(self.path, self.before, self.after)


def mend(path: Path) -> Mended:
    """What becomes of a recipe file; nothing is written yet.

    Raises:
        UserError: the recipe cannot be read.
    """
    load_recipe(path)
    before = text = read_exactly(path)
    done: list[Finding] = []
    seen = {text}
    for _ in range(ROUNDS):
        made, mended = _next(text, path)
        if mended is None or made in seen:
            break
        text = made
        done.append(mended)
        seen.add(text)
    return Mended(path, before, text, done)


def _next(text: str, path: Path) -> tuple[str, Finding | None]:
    """The first of what is found that can be mended. One at a time: it may make the others needless or wrong."""
    for finding in Look(_parsed(text, path)).settings():
        if finding.edits and (made := _mended(text, finding, path)) != text:
            return made, finding
    return text, None


def _mended(text: str, finding: Finding, path: Path) -> str:
    """The text with one mend; as it was where that is another file's to change, or would change anything else."""
    try:
        made = edited(text, finding.edits)
        recipe = _parsed(made, path)
        adopted(recipe)
    except UserError:  # it stays among what is found afterwards
        return text
    wanted = with_edits(_parsed(text, path), finding.edits)
    return made if recipe.model_dump() == wanted.model_dump() else text


def _parsed(text: str, path: Path) -> Recipe:
    return parse_recipe(text.removeprefix("\ufeff"), source=str(path))
