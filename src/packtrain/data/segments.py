"""Examples as segments: stretches of a row that are tokenised apart, so that the mask's edges are exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from packtrain.data.template import Part, Skeleton
from packtrain.data.tokenizer import TokenizerParts
from packtrain.data.words import Tokeniser


class Segment(NamedTuple):
    """``ids`` that are always the same, or ``items`` (literals and indices of contents) to be tokenised.

    Args:
        turn: the message that this segment answers, or -1 for what is given.
        glued: whether it follows ordinary text, not a special token or the row's start.
    """

    turn: int
    ids: list[int] | None
    items: tuple[str | int, ...]
    glued: bool = False

    def text(self, contents: Sequence[str]) -> str:
        """The text to be tokenised."""
        return "".join([item if type(item) is str else contents[item] for item in self.items])  # type: ignore[index]


class Plan(NamedTuple):
    """The segments of one sequence of roles; ``texts`` are those that are not ids."""

    skeleton: Skeleton | None
    segments: tuple[Segment, ...]
    texts: tuple[Segment, ...]

    def flags(self, train_on: str, first_answer: int) -> list[bool]:
        """Whether each segment is learned."""
        if train_on == "all":
            return [True] * len(self.segments)
        last = max((segment.turn for segment in self.segments), default=-1)
        first = last if train_on == "last_assistant" else first_answer
        return [segment.turn >= max(first, 0) for segment in self.segments]


class Planner:
    """Turns skeletons into plans: literals around special tokens become ids once and for all."""

    def __init__(self, tokeniser: Tokeniser, parts: TokenizerParts) -> None:
        self._tokeniser = tokeniser
        self._parts = parts

    def plan(self, skeleton: Skeleton) -> Plan:
        """Segments of a skeleton; the end-of-sequence token follows an answer that nothing else ends."""
        segments: list[Segment] = []
        after_special = True
        for part in skeleton.parts:
            for segment in self._segments(part):
                segments.append(segment._replace(glued=not after_special))
                after_special = segment.ids is not None and self._ends_special(segment)
        segments = self._close(segments, skeleton)
        if len(segments) and segments[0].ids and segments[0].ids[:2] == [*self._parts.bos] * 2:
            segments[0] = segments[0]._replace(ids=segments[0].ids[1:])
        solid = tuple(self._solid(segment) for segment in segments)
        return Plan(skeleton, solid, tuple(segment for segment in solid if segment.ids is None))

    def text_plan(self, prompt: str, completion: str) -> Plan:
        """The segments of plain text: BOS where the tokenizer adds one, prompt, completion, EOS."""
        segments = []
        if self._parts.bos and not (prompt or completion).startswith(self._parts.bos_text):
            segments.append(Segment(-1, list(self._parts.bos), ()))
        if prompt:
            segments.append(Segment(-1, None, (prompt,)))
        segments.append(Segment(0, None, (completion,), glued=bool(prompt)))
        if self._parts.eos_id is not None:
            segments.append(Segment(0, [self._parts.eos_id], ()))
        return Plan(None, tuple(segments), tuple(segment for segment in segments if segment.ids is None))

    def _segments(self, part: Part) -> list[Segment]:
        if not self._tokeniser.exact_at_special:
            return [Segment(part.turn, None, part.items)]
        segments: list[Segment] = []
        items: list[str | int] = []
        for item in part.items:
            marks = list(self._parts.special_pattern.finditer(item)) if isinstance(item, str) else []
            if not marks or not isinstance(item, str):
                items.append(item)
                continue
            start, stop = marks[0].start(), marks[-1].end()
            segments.append(Segment(part.turn, None, (*items, item[:start])))
            segments.append(self._literal(part.turn, item[start:stop]))
            items = [item[stop:]]
        segments.append(Segment(part.turn, None, tuple(items)))
        return [s for s in segments if s.ids or any(item != "" for item in s.items)]

    def _literal(self, turn: int, text: str) -> Segment:
        return Segment(turn, self._tokeniser.encode([text])[0], (text,))

    def _solid(self, segment: Segment) -> Segment:
        """Literals without places need no tokenising per row."""
        if segment.ids is not None or not segment.items or any(isinstance(item, int) for item in segment.items):
            return segment
        encode = self._tokeniser.encode_glued if segment.glued else self._tokeniser.encode
        return segment._replace(ids=encode([segment.text(())])[0])

    def _ends_special(self, segment: Segment) -> bool:
        text = segment.items[-1] if segment.items else ""
        return isinstance(text, str) and any(text.endswith(special) for special in self._parts.special if special)

    def _close(self, segments: list[Segment], skeleton: Skeleton) -> list[Segment]:
        turns = [segment.turn for segment in segments]
        if skeleton.closed or self._parts.eos_id is None or max(turns, default=-1) < 0:
            return segments
        last = max(number for number, turn in enumerate(turns) if turn >= 0)
        eos = Segment(turns[last], [self._parts.eos_id], ())
        # What the template writes after the answer would stand behind the end: it is left out.
        return [*segments[: last + 1], eos]
