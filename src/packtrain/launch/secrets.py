"""Tokens and keys of the environment: they never reach a file of a run."""

from __future__ import annotations

import os
import re

from packtrain.errors import UserError

_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(?:^|_)KEY(?:$|_)", re.IGNORECASE)
_LEAST = 8
"""Shorter values are no secrets, and would be found in any text."""


def redact(text: str) -> str:
    """``text`` with the environment's secrets replaced by the names of their variables."""
    for name, value in _secrets():
        text = text.replace(value, f"<{name}>")
    return text


def refuse_secrets(text: str, where: str = "recipe") -> None:
    """Raises UserError where a text that is to be kept holds a secret of the environment."""
    for name, value in _secrets():
        if value in text:
            mend = "leave it out: Packtrain and the hub read the environment"
            raise UserError(where, f"it holds the value of {name}, and would be kept in a file", mend)


def _secrets() -> list[tuple[str, str]]:
    """The longest first: one may hold another."""
    found = [(name, value) for name, value in os.environ.items() if len(value) >= _LEAST and _NAMES.search(name)]
    return sorted(found, key=lambda pair: -len(pair[1]))
