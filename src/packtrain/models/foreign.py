"""Another library at a user's file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from packtrain.errors import UserError, first_sentence


@contextmanager
def refused(where: str, what: str, mend: str) -> Iterator[None]:
    """Say in one sentence why a library cannot use a file, whatever it raises: transformers checks little of one, and
    tokenizers raises a bare ``Exception``. Nothing of ours belongs inside.

    Raises:
        UserError: the library raised.
    """
    try:
        yield
    except Exception as error:
        reason = first_sentence(error)
        if reason.endswith(":") and error.__cause__ is not None:  # a heading; the cause says what
            reason = first_sentence(error.__cause__)
        raise UserError(where, f"{what} ({reason})", mend) from error
