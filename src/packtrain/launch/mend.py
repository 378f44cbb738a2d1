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

ROUNDS = 20
"""One mend may bring up the next; no recipe needs so many."""


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
        made, mended = _round(text, path)
        if made in seen:
            break
        text, done = made, done + mended
        seen.add(text)
    return Mended(path, before, text, done)


def _round(text: str, path: Path) -> tuple[str, list[Finding]]:
    """All that is found in a recipe mended at once; of two mends of one setting the first."""
    taken: set[str] = set()
    mended = []
    for finding in Look(_parsed(text, path)).settings():
        if not finding.edits or taken & finding.edits.keys():
            continue
        made = _mended(text, finding, path)
        if made != text:
            text, taken = made, taken | finding.edits.keys()
            mended.append(finding)
    return text, mended


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
