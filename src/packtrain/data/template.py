"""Chat templates: rendering, and where in the rendering the answers are.

Running jinja for each row costs more than tokenising it. For each sequence of roles the template is rendered
once on sentinels, and the rendering is cut around them into a ``Skeleton`` that later rows only fill in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from packtrain.data.formats import RowError
from packtrain.data.tokenizer import TokenizerParts, any_of
from packtrain.errors import UserError

Roles = tuple[str, ...]

PLAIN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ '### User:\n' + message['content'] + '\n\n' }}"
    "{% else %}{{ '### Assistant:\n' + message['content'] + (eos_token or '') + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPS: dict[str, Callable[[str], str]] = {
    "": str,
    "both": str.strip,
    "left": str.lstrip,
    "right": str.rstrip,
}


class Part(NamedTuple):
    """A stretch of a rendered chat. ``turn``: the assistant's message that it belongs to, or -1. ``items``:
    literals, and the indices of contents between them."""

    turn: int
    items: tuple[str | int, ...]


@dataclass(frozen=True)
class Skeleton:
    """The rendering of one sequence of roles with places for the contents.

    Args:
        parts: in order, prompt and answer in turn.
        strips: for each content, how the template strips it (a key of ``STRIPS``).
        closed: whether an end-of-turn token follows the last answer.
    """

    parts: tuple[Part, ...]
    strips: tuple[str, ...]
    closed: bool

    def fill(self, contents: Sequence[str]) -> list[str]:
        """The contents as the template shows them."""
        return [STRIPS[strip](content) for strip, content in zip(self.strips, contents, strict=True)]

    def render(self, contents: Sequence[str]) -> str:
        """The whole text."""
        filled = self.fill(contents)
        return "".join(item if isinstance(item, str) else filled[item] for part in self.parts for item in part.items)


class RefusalError(Exception):
    """The template raised; the message is the template's own."""


def choose_template(setting: str, tokenizer: Any) -> tuple[str, str | None]:
    """The chat template's text for ``data.template``, and a warning or None.

    Raises:
        UserError: the .jinja file is missing, or not a template.
    """
    if setting == "auto":
        own = tokenizer.get_chat_template() if tokenizer.chat_template else None
        warning = "the tokenizer has no chat template: `plain` is used (data.template chooses another)"
        return (own, None) if own else (PLAIN, warning)
    if setting in ("plain", "chatml"):
        return {"plain": PLAIN, "chatml": CHATML}[setting], None
    return _read_template(Path(setting)), None


def _read_template(path: Path) -> str:
    import jinja2

    where = "data.template"
    if path.suffix not in (".jinja", ".jinja2", ".j2") or not path.is_file():
        what = f"'{path}' is neither auto, plain, chatml nor an existing .jinja file"
        raise UserError(where, what, "choose one of these, or correct the path")
    text = path.read_text(encoding="utf-8-sig")
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).lex(text)
        ChatTemplate(text, None).compile()
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{path}:{error.lineno}", f"not a jinja template: {error.message}", "mend that line") from error
    return text


class ChatTemplate:
    """A template, its skeletons, and the fallback for chats that they do not reproduce."""

    def __init__(self, text: str, tokenizer: TokenizerParts | None, rendered: frozenset[Roles] = frozenset()) -> None:
        self.text = text
        self.rendered = rendered
        self._variables = tokenizer.variables if tokenizer else {}
        self._special = tokenizer.special_pattern if tokenizer else any_of(())
        self._skeletons: dict[Roles, Skeleton | None] = {}

    def compile(self) -> None:
        """Raise jinja's own error for a text that is no template."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        _compile_jinja_template(self.text)

    def render(self, roles: Sequence[str], contents: Sequence[str], generate: bool = False) -> str:
        """The text of a chat by the template itself.

        Raises:
            RefusalError: the template raised.
        """
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        try:
            rendered: Any = render_jinja_template(
                conversations=[messages],
                chat_template=self.text,
                add_generation_prompt=generate,
                **self._variables,
            )
        except jinja2.TemplateError as error:
            raise RefusalError(str(error)) from error
        return str(rendered[0][0])

    def skeleton(self, roles: Roles) -> Skeleton | None:
        """The skeleton for these roles, or None where rows must be rendered one by one."""
        if roles not in self._skeletons:
            self._skeletons[roles] = None if roles in self.rendered else self._build(roles)
        return self._skeletons[roles]

    def left_out(self, roles: Roles) -> list[str]:
        """Roles whose content the template does not show."""
        cores = [f"QzX{number}XzQ" for number in range(len(roles))]
        text = self.render(roles, cores)
        return sorted({role for role, core in zip(roles, cores, strict=True) if core not in text})

    def locate(self, roles: Roles, contents: Sequence[str]) -> Skeleton:
        """Render this chat and find its answers: a skeleton without places.

        Raises:
            RowError: an answer is not in the rendering.
        """
        text = self.render(roles, contents)
        found = self._find(text, roles, contents)
        spans, closed = self._answers(text, roles, contents, found)
        return Skeleton(tuple(Part(turn, (text[a:b],)) for turn, a, b in _tiled(spans, len(text))), (), closed)

    def refused_role(self, roles: Roles) -> str:
        """Which role the template refuses, as far as leaving it out tells."""
        rest = roles[1:]
        if roles[0] != "system":
            return f"the roles {', '.join(roles)}"
        try:
            self.render(rest, ["x"] * len(rest))
        except RefusalError:
            return f"the roles {', '.join(roles)}"
        return "the role 'system'"

    def _build(self, roles: Roles) -> Skeleton | None:
        cores = [f"QzX{number}XzQ" for number in range(len(roles))]
        text = self.render(roles, cores)
        found = [(text.find(core), text.find(core) + len(core)) for core in cores]
        if found != sorted(found) or any(text.count(core) != 1 for core in cores):
            return None
        spans, closed = self._answers(text, roles, cores, found)
        marks = any_of(set(cores))
        parts = tuple(Part(turn, _cut(text[a:b], marks, cores)) for turn, a, b in _tiled(spans, len(text)))
        strips = self._strips(roles, cores, text, found)
        return Skeleton(parts, strips, closed) if strips is not None else None

    def _strips(
        self, roles: Roles, cores: list[str], text: str, found: list[tuple[int, int]]
    ) -> tuple[str, ...] | None:
        """Render with white space around each content and see what is left of it."""
        pad = " \n\t "
        padded = self.render(roles, [pad + core + pad for core in cores])
        strips, start = [], 0
        edges = [0, *(stop for _, stop in found)]
        for number, core in enumerate(cores):
            before = text[edges[number] : found[number][0]]
            shown = {"": pad + core + pad, "both": core, "left": core + pad, "right": pad + core}
            fitting = [name for name, form in shown.items() if padded.startswith(before + form, start)]
            if not fitting:
                return None
            best = max(fitting, key=lambda name: len(shown[name]))
            strips.append(best)
            start += len(before + shown[best])
        return tuple(strips) if padded[start:] == text[edges[-1] :] else None

    def _find(self, text: str, roles: Roles, contents: Sequence[str]) -> list[tuple[int, int]]:
        found, start = [], 0
        for number, (role, content) in enumerate(zip(roles, contents, strict=True), 1):
            # Some templates show an answer without its reasoning.
            forms = (content, content.strip(), content.rpartition("</think>")[2].strip())
            form = next((f for f in forms if text.find(f, start) >= 0), None)
            if form is None and role == "assistant":
                raise RowError(f"message {number}: the answer is not found in what the template renders")
            at = text.find(form, start) if form is not None else start
            start = at + len(form or "")
            found.append((at, start))
        return found

    def _answers(
        self, text: str, roles: Roles, contents: Sequence[str], found: list[tuple[int, int]]
    ) -> tuple[list[tuple[int, int, int]], bool]:
        """``(turn, start, stop)`` of each answer with its end of turn, and whether the last has an end."""
        spans, closed, last = [], False, 0
        for turn, role in enumerate(roles):
            if role != "assistant":
                continue
            start = max(self._start(text, roles[:turn], contents[:turn], found[turn][0]), last)
            limit = found[turn + 1][0] if turn + 1 < len(found) else len(text)
            end = self._special.search(text, found[turn][1], limit)
            closed, last = end is not None, end.end() if end else found[turn][1]
            spans.append((turn, start, last))
        return spans, closed

    def _start(self, text: str, roles: Roles, contents: Sequence[str], content_start: int) -> int:
        """Where the model starts to write: after the generation prompt. What the template puts before the
        content (a space, an empty <think>) is learned, the role's header is not."""
        prompt = self.render(roles, contents, generate=True) if roles else ""
        shared = _shared(prompt, text[:content_start])
        return content_start if self._special.search(text, shared, content_start) else shared


def _shared(a: str, b: str) -> int:
    """The length of the common start of two texts."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _tiled(spans: list[tuple[int, int, int]], length: int) -> list[tuple[int, int, int]]:
    """The answers with the prompts between them, turn -1; nothing empty."""
    tiles, last = [], 0
    for turn, start, stop in spans:
        tiles += [(-1, last, start), (turn, start, stop)]
        last = stop
    return [tile for tile in [*tiles, (-1, last, length)] if tile[1] < tile[2]]


def _cut(text: str, marks: Any, cores: list[str]) -> tuple[str | int, ...]:
    items: list[str | int] = []
    last = 0
    for match in marks.finditer(text):
        items += [text[last : match.start()], cores.index(match.group())]
        last = match.end()
    return tuple(item for item in [*items, text[last:]] if item != "")
