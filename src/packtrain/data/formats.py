"""A row of any format becomes an ``Example``, or a ``RowError`` that says why not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from packtrain.config.schema import Columns
from packtrain.data.registry import recognised
from packtrain.errors import UserError, nearest

ANSWERS = ("output", "summary", "completion", "answer", "target", "response")
ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bard": "assistant", "bing": "assistant", "system": "system",
}  # fmt: skip


class RowError(Exception):
    """Why one row cannot be used; it is dropped and reported."""


class Chat(NamedTuple):
    """Messages, as two parallel sequences. ``first_answer``: earlier assistant turns are not learned."""

    roles: tuple[str, ...]
    contents: list[str]
    first_answer: int = 0


class Text(NamedTuple):
    """Plain text that is learned from ``prompt``'s end on; no chat template is applied."""

    prompt: str
    completion: str


class Tokens(NamedTuple):
    """A row that its function already tokenised."""

    ids: list[int]
    labelled: list[bool]


Example = Chat | Text | Tokens
Reader = Callable[[dict[str, Any]], Example]


def choose_reader(
    name: str,
    columns: Columns,
    prompt: str | None,
    answer: str | None,
    first: Sequence[dict[str, Any]],
    where: str,
) -> Reader:
    """The function that reads this data set's rows.

    Args:
        name: a format of the schema, or ``auto`` to go by the columns of the ``first`` rows.
        prompt: a template with ``{column}`` places; it comes before any format.
        answer: the answer's column for ``prompt``.
        where: the data set, for errors.

    Raises:
        UserError: no format fits the columns.
    """
    seen = {key: row[key] for row in reversed(first) for key in row}
    if prompt is None and name == "auto" and not columns.model_dump(exclude_none=True):
        known = recognised(set(seen))
        prompt, answer = (known.prompt, known.answer) if known else (prompt, answer)
    if prompt is not None:
        _check_prompt(prompt, where)
        named = columns.output or columns.completion or answer
        return _prompt_reader(prompt, named or _answer_column(seen, where))
    name = _detect(columns, seen, where) if name == "auto" else name
    if name in ("messages", "sharegpt"):
        return _chat_reader(name, columns, seen)
    if name == "tokens":
        return read_tokens
    return {"alpaca": _alpaca_reader, "prompt_completion": _completion_reader, "text": _text_reader}[name](columns)


def _detect(columns: Columns, seen: dict[str, Any], where: str) -> str:
    conversation = seen.get(columns.conversations or "conversations", seen.get("conversation"))
    if isinstance(conversation, list) and conversation and isinstance(conversation[0], dict):
        return "sharegpt" if "from" in conversation[0] else "messages"
    signs = {
        "messages": [columns.messages or "messages"],
        "alpaca": [columns.instruction or "instruction", columns.output or "output"],
        "prompt_completion": [columns.prompt or "prompt", columns.completion or "completion"],
        "tokens": ["input_ids"],
        "text": [columns.text or "text"],
    }
    for name, needed in signs.items():
        if all(column in seen for column in needed):
            return name
    what = f"no format is known for the columns {', '.join(seen) or '(none)'}"
    mend = "give this data set a `format` with `columns`, or a `prompt` such as 'Summarise: {dialogue}'"
    raise UserError(where, what, mend)


def _answer_column(seen: dict[str, Any], where: str) -> str:
    for name in ANSWERS:
        if name in seen:
            return name
    what = f"none of the columns {', '.join(seen)} is known as the answer ({', '.join(ANSWERS)})"
    raise UserError(where, what, "name the answer's column in `columns: {output: ...}`")


def text_of(values: dict[str, Any], column: str) -> str:
    """The text in a column, or the fault that it is missing or something else."""
    value = values.get(column)
    if isinstance(value, str):
        return value
    if column not in values:
        close = nearest(column, values)
        hint = f" (did you mean '{close}'?)" if close else ""
        raise RowError(f"no column '{column}', the row has {', '.join(values) or 'none'}{hint}")
    raise RowError(f"column '{column}' is {_type_name(value)}, not text")


def _optional(values: dict[str, Any], column: str) -> str:
    return text_of(values, column) if values.get(column) is not None else ""


def _answer(values: dict[str, Any], column: str) -> str:
    answer = text_of(values, column)
    if not answer.strip():
        raise RowError(f"empty answer in column '{column}'")
    return answer


def _pair(system: str, user: str, answer: str) -> Chat:
    if system:
        return Chat(("system", "user", "assistant"), [system, user, answer])
    return Chat(("user", "assistant"), [user, answer])


def _check_prompt(template: str, where: str) -> None:
    """A prompt names at least one column, and closes every brace that opens a name."""
    unclosed = re.search(r"\{\w+(?![\w}])", template)
    if unclosed or not re.search(r"\{\w+\}", template):
        what = f"the prompt {template!r} has no {{column}} in it"
        if unclosed:
            what = f"the prompt {template!r} opens '{unclosed[0]}' and does not close it"
        raise UserError(where, what, "write columns as in 'Summarise: {dialogue}'")


def _prompt_reader(template: str, answer_column: str) -> Reader:
    parts = re.split(r"\{(\w+)\}", template)
    literals, names = parts[::2], parts[1::2]

    def read(values: dict[str, Any]) -> Chat:
        answer = values.get(answer_column)
        if isinstance(answer, list) and answer:  # jfleg has several corrections: the first one is learned
            values = {**values, answer_column: answer[0]}
        user = literals[0] + "".join([text_of(values, n) + t for n, t in zip(names, literals[1:], strict=True)])
        return Chat(("user", "assistant"), [user, _answer(values, answer_column)])

    return read


def _alpaca_reader(columns: Columns) -> Reader:
    instruction, given = columns.instruction or "instruction", columns.input or "input"
    output, system = columns.output or "output", columns.system or "system"

    def read(values: dict[str, Any]) -> Chat:
        user, extra = text_of(values, instruction), _optional(values, given)
        user = f"{user}\n\n{extra}" if extra else user
        return _pair(_optional(values, system), user, _answer(values, output))

    return read


def _text_reader(columns: Columns) -> Reader:
    column = columns.text or "text"
    return lambda values: Text("", _answer(values, column))


def _completion_reader(columns: Columns) -> Reader:
    prompt, completion = columns.prompt or "prompt", columns.completion or "completion"

    def read(values: dict[str, Any]) -> Example:
        if isinstance(values.get(prompt), list) and isinstance(values.get(completion), list):
            given = values[prompt]
            chat = chat_of(given + values[completion], "role", "content", {})
            return chat._replace(first_answer=len(given))
        return Text(text_of(values, prompt), _answer(values, completion))

    return read


def _chat_reader(name: str, columns: Columns, seen: dict[str, Any]) -> Reader:
    own = columns.messages if name == "messages" else columns.conversations
    usual = ("messages", "conversations", "conversation")
    column = own or next((key for key in usual if key in seen), usual[0] if name == "messages" else usual[1])
    keys = ("role", "content") if name == "messages" else ("from", "value")
    names = {} if name == "messages" else SHAREGPT_ROLES
    system = columns.system or "system"

    def read(values: dict[str, Any]) -> Chat:
        turns = values.get(column)
        if not isinstance(turns, list):
            text_of(values, column)
            raise RowError(f"column '{column}' is text, not a list of messages")
        chat = chat_of(turns, *keys, names)
        if names and values.get(system) and chat.roles[0] != "system":
            return Chat(("system", *chat.roles), [text_of(values, system), *chat.contents])
        return chat

    return read


def chat_of(turns: list[Any], role_key: str, content_key: str, names: dict[str, str]) -> Chat:
    """Check messages: known roles, users and assistants in turn, at least one assistant, no empty answer."""
    roles, contents = [], []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise RowError(f"message {number} is {_type_name(turn)}, not an object")
        role, content = turn.get(role_key), turn.get(content_key)
        if not isinstance(role, str) or not isinstance(content, str):
            key, value = (role_key, role) if not isinstance(role, str) else (content_key, content)
            raise RowError(f"message {number}: '{key}' is {_type_name(value)}, not text")
        roles.append(names.get(role, role))
        contents.append(content)
    _check_order(roles)
    for number, (role, content) in enumerate(zip(roles, contents, strict=True), 1):
        if role == "assistant" and not content.strip():
            raise RowError(f"message {number}: empty answer")
    return Chat(tuple(roles), contents)


def _check_order(roles: list[str]) -> None:
    expected = "user"
    for number, role in enumerate(roles, 1):
        if role not in ROLES:
            raise RowError(f"message {number}: unknown role '{role}'")
        if role == "system" and number == 1:
            continue
        if role != expected:
            before = "at the start" if number == 1 else f"after '{roles[number - 2]}'"
            raise RowError(f"message {number}: role '{role}' {before}, where '{expected}' is expected")
        expected = "user" if role == "assistant" else "assistant"
    if "assistant" not in roles:
        raise RowError("no assistant turn")


def read_tokens(values: dict[str, Any]) -> Tokens:
    """A tokenised row: input_ids, and labels where -100 is masked. Padding by attention_mask is taken off."""
    ids = _integers(values, "input_ids")
    labels = _integers(values, "labels") if values.get("labels") is not None else ids
    mask = _integers(values, "attention_mask") if values.get("attention_mask") is not None else [1] * len(ids)
    if not len(ids) == len(labels) == len(mask):
        raise RowError(f"input_ids has {len(ids)} items, labels {len(labels)}, attention_mask {len(mask)}")
    if any(label not in (-100, token) for token, label in zip(ids, labels, strict=True)):
        raise RowError("labels differ from input_ids where they are not -100")
    kept = [(token, label != -100) for token, label, real in zip(ids, labels, mask, strict=True) if real]
    return Tokens([token for token, _ in kept], [labelled for _, labelled in kept])


def _integers(values: dict[str, Any], column: str) -> list[int]:
    value = values.get(column)
    value = value.tolist() if value is not None and hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
        raise RowError(f"column '{column}' is not a list of integers")
    return list(value)


def _type_name(value: Any) -> str:
    names = {
        type(None): "empty (null)",
        bool: "true or false",
        list: "a list",
        dict: "an object",
        str: "text",
    }
    return names.get(type(value), "a number")
