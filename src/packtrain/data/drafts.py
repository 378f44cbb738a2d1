"""From an example to a ``Draft``: which segments a row has, before anything is tokenised."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from packtrain.data.files import place
from packtrain.data.formats import Chat, Example, RowError, Text, Tokens
from packtrain.data.segments import Plan, Planner, Segment
from packtrain.data.store import Rows
from packtrain.data.template import ChatTemplate, RefusalError, Roles
from packtrain.data.tokenizer import TokenizerParts, any_of
from packtrain.data.words import Tokeniser
from packtrain.errors import UserError

VERIFIED_FIRST, VERIFIED_EVERY = 3, 1000
NO_END = "the chat template ends the last answer with no special token: the end-of-sequence token is added"
LEFT_OUT = "the chat template leaves out the content of role '{}'"


class SkeletonError(Exception):
    """A skeleton does not reproduce the template: rows of these roles must be rendered one by one."""

    def __init__(self, roles: Roles) -> None:
        super().__init__(roles)
        self.roles = roles


@dataclass(frozen=True)
class Job:
    """All that encoding one part of the data depends on; picklable."""

    tokenizer: TokenizerParts
    template: str
    max_length: int
    overlong: str
    train_on: str
    rendered: frozenset[Roles] = frozenset()


@dataclass
class Encoded:
    """A chunk's rows and what happened to the others.

    Args:
        counts: rows ``read``, ``truncated`` and ``split``, ``tokens_cut``.
        faults: line or row number and reason of each dropped row.
        special: numbers of rows whose content holds the text of a special token.
    """

    file: str
    unit: str
    rows: Rows | None = None
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[int, str]] = field(default_factory=list)
    special: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def where(self, number: int) -> str:
        """The place of one of the chunk's rows."""
        return place(self.file, number, self.unit)


class Draft(NamedTuple):
    """A row before tokenisation.

    Args:
        segments: in order; ``texts``: those of them that must still be tokenised, with ``contents`` put in.
        flags: whether each segment is learned.
        located: whether contents cannot be told from the template's words.
    """

    number: int
    example: Example
    segments: Sequence[Segment]
    texts: Sequence[Segment]
    contents: list[str]
    flags: list[bool]
    located: bool = False


class Drafter:
    """Drafts the rows of a job; remembers a plan for each sequence of roles."""

    def __init__(self, job: Job, tokeniser: Tokeniser) -> None:
        self._job = job
        self._special = job.tokenizer.special_pattern
        self._planner = Planner(tokeniser, job.tokenizer)
        self._template = ChatTemplate(job.template, job.tokenizer, job.rendered)
        self._markup = any_of({*job.tokenizer.added, *job.tokenizer.special, *_marks(job.template)})
        self._plans: dict[Roles, Plan | None] = {}
        self._flags: dict[tuple[Roles, int], list[bool]] = {}
        self._seen: Counter[Roles] = Counter()

    def draft(self, number: int, example: Example, out: Encoded) -> Draft:
        """Choose a row's segments.

        Raises:
            RowError: the row cannot be used.
            UserError: the chat template refuses it.
            SkeletonError: see there.
        """
        if isinstance(example, Chat):
            return self._chat(number, example, out)
        if isinstance(example, Text):
            self._is_marked(number, example, out)
            plan = self._planner.text_plan(*example)
            return Draft(number, example, plan.segments, plan.texts, [], plan.flags(self._job.train_on, 0), True)
        if not example.ids:
            raise RowError("no tokens")
        return _token_draft(number, example)

    def _chat(self, number: int, chat: Chat, out: Encoded) -> Draft:
        try:
            draft, closed = self._chat_draft(number, chat, out)
        except RefusalError as refusal:
            role = self._template.refused_role(chat.roles)
            what = f"the chat template refuses {role}: {str(refusal).rstrip('.')}"
            mend = "fold the system text into the first user turn, or choose another data.template"
            raise UserError(out.where(number), what, mend) from refusal
        if not closed and NO_END not in out.warnings:
            out.warnings.append(NO_END)
        return draft

    def _chat_draft(self, number: int, chat: Chat, out: Encoded) -> tuple[Draft, bool]:
        roles, contents = chat.roles, chat.contents
        if roles not in self._plans:
            skeleton = self._template.skeleton(roles)
            self._plans[roles] = self._planner.plan(skeleton) if skeleton else None
            out.warnings += [LEFT_OUT.format(role) for role in self._template.left_out(roles)]
        plan = self._plans[roles]
        marked = self._is_marked(number, contents, out)
        if plan is None or plan.skeleton is None or marked or not all(map(str.strip, contents)):
            return self._located(number, chat)
        self._verify(number, chat, plan)
        key = roles, chat.first_answer
        if key not in self._flags:
            self._flags[key] = plan.flags(self._job.train_on, chat.first_answer)
        filled = plan.skeleton.fill(contents)
        return Draft(number, chat, plan.segments, plan.texts, filled, self._flags[key]), plan.skeleton.closed

    def _located(self, number: int, chat: Chat) -> tuple[Draft, bool]:
        skeleton = self._template.locate(chat.roles, chat.contents)
        plan = self._planner.plan(skeleton)
        flags = plan.flags(self._job.train_on, chat.first_answer)
        return Draft(number, chat, plan.segments, plan.texts, [], flags, True), skeleton.closed

    def _verify(self, number: int, chat: Chat, plan: Plan) -> None:
        self._seen[chat.roles] += 1
        if self._seen[chat.roles] > VERIFIED_FIRST and number % VERIFIED_EVERY:
            return
        assert plan.skeleton
        if plan.skeleton.render(chat.contents) != self._template.render(chat.roles, chat.contents):
            raise SkeletonError(chat.roles)

    def _is_marked(self, number: int, contents: Sequence[str], out: Encoded) -> bool:
        """Whether a content holds a special token or a mark that the template looks for."""
        text = "\n".join(contents)
        if not self._markup.search(text):
            return False
        if self._special.search(text):
            out.special.append(number)
        return True


def _token_draft(number: int, example: Tokens) -> Draft:
    segments, flags = [], []
    pairs = zip(example.ids, example.labelled, strict=True)
    for labelled, run in groupby(pairs, key=lambda pair: pair[1]):
        segments.append(Segment(0 if labelled else -1, [token for token, _ in run], ()))
        flags.append(labelled)
    return Draft(number, example, segments, (), [], flags, True)


def _marks(template: str) -> list[str]:
    """Strings in the template that are markup, such as ``</think>``: it may look for them in a content."""
    literals = re.findall(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", template)
    texts = (a or b for a, b in literals)
    return [text for text in texts if re.fullmatch(r"[<\[|{][^\s\\]{2,}[>\]|}]", text)]
