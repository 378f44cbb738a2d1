"""The errors a user can cause. Everything else is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """The user's input is at fault.

    Args:
        where: the file, line or setting at fault, e.g. ``recipe.yaml:12: train.epochs``.
        what: what is wrong, with the offending value, without a full stop.
        mend: the next action, as an imperative, without a full stop.

    The command line prints ``str(error)`` on one line and exits with status 2.
    """

    def __init__(self, where: str, what: str, mend: str) -> None:
        self.where, self.what, self.mend = where, what, mend
        super().__init__(f"{where}: {what}; {mend}.")

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        return type(self), (self.where, self.what, self.mend)


def first_sentence(error: BaseException) -> str:
    """Of what another library says, without its full stop; the error's name where it says nothing."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].rstrip(". ")


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice closest in spelling to ``name``, or None where nothing is close."""
    matches = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return matches[0] if matches else None


def listed(names: Iterable[str]) -> str:
    """``a, b or c``."""
    items = list(names)
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " or " + items[-1]
