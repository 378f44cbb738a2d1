"""What becomes of a row that is longer than ``max_length``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from packtrain.data.formats import Chat, RowError


class Block(NamedTuple):
    """A tokenised segment. ``floor``: of a prompt's text, the tokens of the template's own words around the
    content; None for what may not be cut."""

    ids: list[int]
    floor: int | None


def truncate_prompt(blocks: list[Block], max_length: int) -> list[Block]:
    """Cut the middle of the longest prompt texts; answers, BOS and the template's words stay whole.

    Raises:
        RowError: even without any prompt the row does not fit.
    """
    spare = [max(0, len(block.ids) - block.floor) if block.floor is not None else 0 for block in blocks]
    fixed = sum(len(block.ids) for block in blocks) - sum(spare)
    if fixed > max_length:
        raise RowError(f"the answer and the template alone are longer than max_length ({fixed} > {max_length} tokens)")
    kept = _share(spare, max_length - fixed)
    return [
        block if keep == room else block._replace(ids=_without_middle(block.ids, keep + (block.floor or 0)))
        for block, room, keep in zip(blocks, spare, kept, strict=True)
    ]


def split_text(
    ids: list[list[int]], flags: list[bool], max_length: int
) -> Iterator[tuple[list[list[int]], list[bool]]]:
    """Consecutive pieces of ``max_length`` tokens, each with its own labels: runs of ids and their flags."""
    tokens = [(token, flag) for run, flag in zip(ids, flags, strict=True) for token in run]
    for start in range(0, len(tokens), max_length):
        runs = [(flag, list(run)) for flag, run in groupby(tokens[start : start + max_length], key=itemgetter(1))]
        yield [[token for token, _ in run] for _, run in runs], [flag for flag, _ in runs]


def split_chat(chat: Chat, fits: Callable[[Chat], bool]) -> Iterator[Chat]:
    """Consecutive exchanges, as many to a part as fit, each part with the system message.

    Raises:
        RowError: one exchange alone does not fit.
    """
    head = 1 if chat.roles[0] == "system" else 0
    starts = [number for number, role in enumerate(chat.roles) if role == "user"]
    stops = [*starts[1:], len(chat.roles)]
    begin = starts[0]
    for start, stop in zip(starts, stops, strict=True):
        if start > begin and not fits(_part(chat, head, begin, stop)):
            yield _part(chat, head, begin, start)
            begin = start
        if start == begin and not fits(_part(chat, head, start, stop)):
            raise RowError("one turn alone is longer than max_length, so that it cannot be split")
    yield _part(chat, head, begin, len(chat.roles))


def _part(chat: Chat, head: int, start: int, stop: int) -> Chat:
    first_answer = max(chat.first_answer - start + head, 0)
    return Chat(
        chat.roles[:head] + chat.roles[start:stop],
        chat.contents[:head] + chat.contents[start:stop],
        first_answer,
    )


def _share(spare: list[int], budget: int) -> list[int]:
    """Cut all to one height so that the sum is within ``budget``: short texts stay whole."""
    kept = [0] * len(spare)
    order = sorted(range(len(spare)), key=spare.__getitem__)
    for position, index in enumerate(order):
        kept[index] = min(spare[index], budget // (len(order) - position))
        budget -= kept[index]
    return kept


def _without_middle(ids: list[int], keep: int) -> list[int]:
    head = (keep + 1) // 2
    return ids[:head] + ids[len(ids) - (keep - head) :]
