"""Rows to tokens and label masks, a chunk at a time; the same code in this process and in a worker."""

from __future__ import annotations

from itertools import chain

from packtrain.data.drafts import Draft, Drafter, Encoded, Job
from packtrain.data.files import Chunk
from packtrain.data.formats import Chat, Reader, RowError
from packtrain.data.overlong import Block, split_chat, split_text, truncate_prompt
from packtrain.data.segments import Segment
from packtrain.data.store import RowsBuilder
from packtrain.data.words import Tokeniser
from packtrain.errors import UserError

# Of a prompt whose contents cannot be told from the template's words, this many tokens stay at its ends.
LOCATED_FLOOR = 32


class Encoder:
    """Turns chunks into ``Encoded``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._tokeniser = Tokeniser(job.tokenizer)
        self._drafter = Drafter(job, self._tokeniser)
        self._floors: dict[tuple[str | int, ...], int] = {}

    def encode(self, chunk: Chunk, read: Reader) -> Encoded:
        """Encode the rows of a chunk.

        Raises:
            UserError: the chunk is not readable, the template refuses a row, or ``overlong: error`` met one.
            SkeletonError: start again with these roles in ``Job.rendered``.
        """
        out = Encoded(chunk.file, chunk.unit)
        drafts: list[Draft] = []
        for number, values in chunk.numbered():
            out.counts["read"] += 1
            try:
                drafts.append(self._drafter.draft(number, read(values), out))
            except RowError as fault:
                out.faults.append((number, str(fault)))
        rows = RowsBuilder()
        for draft, ids in zip(drafts, self._tokenise(drafts), strict=True):
            try:
                self._add(draft, ids, rows, out)
            except RowError as fault:
                out.faults.append((draft.number, str(fault)))
        out.rows = rows.build()
        out.faults.sort()
        return out

    def _tokenise(self, drafts: list[Draft]) -> list[list[list[int]]]:
        """The ids of each segment of each draft; all texts go to the tokeniser in two calls."""
        plain: list[str] = []
        glued: list[str] = []
        for draft in drafts:
            for segment in draft.texts:
                (glued if segment.glued else plain).append(segment.text(draft.contents))
        next_plain = iter(self._tokeniser.encode(plain)).__next__
        next_glued = iter(self._tokeniser.encode_glued(glued)).__next__
        return [
            [
                segment.ids if segment.ids is not None else (next_glued() if segment.glued else next_plain())
                for segment in draft.segments
            ]
            for draft in drafts
        ]

    def _add(self, draft: Draft, ids: list[list[int]], rows: RowsBuilder, out: Encoded) -> None:
        size = sum(map(len, ids))
        if size <= self.job.max_length:
            _append(rows, draft.number, ids, draft.flags)
        elif self.job.overlong == "truncate_prompt":
            self._truncate(draft, ids, rows, out)
        elif self.job.overlong == "split":
            self._split(draft, ids, rows, out)
        elif self.job.overlong == "drop":
            out.counts["tokens_cut"] += size
            raise RowError("longer than max_length")
        else:
            what = f"the row has {size} tokens, data.max_length is {self.job.max_length}"
            raise UserError(
                out.where(draft.number),
                what,
                "raise data.max_length, or set data.overlong to truncate_prompt",
            )

    def _truncate(self, draft: Draft, ids: list[list[int]], rows: RowsBuilder, out: Encoded) -> None:
        size = sum(map(len, ids))
        try:
            blocks = truncate_prompt(self._as_blocks(draft, ids), self.job.max_length)
        except RowError:
            out.counts["tokens_cut"] += size
            raise
        cut = [block.ids for block in blocks]
        out.counts["truncated"] += 1
        out.counts["tokens_cut"] += size - sum(map(len, cut))
        _append(rows, draft.number, cut, draft.flags)

    def _split(self, draft: Draft, ids: list[list[int]], rows: RowsBuilder, out: Encoded) -> None:
        if not isinstance(draft.example, Chat):
            for part, flags in split_text(ids, draft.flags, self.job.max_length):
                if any(flags):
                    _append(rows, draft.number, part, flags)
        else:
            for chat in list(split_chat(draft.example, lambda chat: self._fits(draft.number, chat, out))):
                part_draft = self._drafter.draft(draft.number, chat, out)
                _append(rows, draft.number, self._tokenise([part_draft])[0], part_draft.flags)
        out.counts["split"] += 1

    def _fits(self, number: int, chat: Chat, out: Encoded) -> bool:
        draft = self._drafter.draft(number, chat, out)
        return sum(map(len, self._tokenise([draft])[0])) <= self.job.max_length

    def _as_blocks(self, draft: Draft, ids: list[list[int]]) -> list[Block]:
        return [
            Block(part, self._floor(segment, draft.located, len(part)))
            for segment, part in zip(draft.segments, ids, strict=True)
        ]

    def _floor(self, segment: Segment, located: bool, size: int) -> int | None:
        """The tokens of a segment that must stay, or None for all."""
        if segment.turn >= 0:
            return None
        if located:
            return min(size, LOCATED_FLOOR) if size > LOCATED_FLOOR else None
        if segment.ids is not None:
            return None
        if segment.items not in self._floors:
            literals = [item for item in segment.items if isinstance(item, str)]
            self._floors[segment.items] = len(list(chain.from_iterable(self._tokeniser.encode(literals))))
        return self._floors[segment.items]


def _append(rows: RowsBuilder, number: int, ids: list[list[int]], flags: list[bool]) -> None:
    if not rows.append(number, ids, flags):
        raise RowError("no token of the row would be learned")
