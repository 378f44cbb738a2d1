"""Settings of a recipe file are changed in its text: comments, order and everything else stay as they are."""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml

from packtrain.config.rule import Edits
from packtrain.errors import UserError, first_sentence
from packtrain.launch.folder import write_text

_BOM = "\ufeff"
_KEY_IN_SECTION = re.compile(r"^( +)[\w'\"]+ *:", re.MULTILINE)
_REQUIRED = ("model", "data")


def edited(text: str, edits: Edits) -> str:
    """A recipe's text with some settings changed; None leaves a key out, and its section where that is then empty.

    Raises:
        UserError: a setting lies in what is no mapping, such as a DeepSpeed JSON that is a file; or the text is no
            YAML 1.2.
    """
    if text.startswith(_BOM):
        return _BOM + edited(text.removeprefix(_BOM), edits)
    if "\r\n" in text:
        return edited(text.replace("\r\n", "\n"), edits).replace("\n", "\r\n")
    writer, document = _load(text)
    plain = _dumped(writer, document)
    for key, value in edits.items():
        _set(document, key, value)
    after = _dumped(writer, document)
    made = _least_change(text, plain, after)
    return made if yaml.safe_load(made) == yaml.safe_load(after) else after


def replace_recipe(path: Path, before: str, after: str) -> None:
    """Write a recipe file at once or not at all; a link stays one, and permissions stay.

    Raises:
        UserError: the file is no longer what was read, or cannot be written.
    """
    real = path.resolve()
    try:
        if not os.access(real, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if read_exactly(real) != before:
            raise UserError(str(path), "has changed in the meantime", "run the command again")
        write_text(real, after, stat.S_IMODE(real.stat().st_mode))
    except OSError as error:
        mend = "make it writable, or apply the difference by hand"
        raise UserError(str(path), f"cannot be written ({error.strerror})", mend) from error


def read_exactly(path: Path) -> str:
    """The text of a file with its line ends as they are."""
    return path.read_bytes().decode("utf-8")


def _load(text: str) -> tuple[Any, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.util import load_yaml_guess_indent

    writer = YAML()
    writer.preserve_quotes = True
    writer.width = 1 << 16
    try:
        _, _, offset = load_yaml_guess_indent(text)
        document = writer.load(text)
    except YAMLError as error:
        what = f"the recipe is not YAML 1.2 ({first_sentence(error)})"
        raise UserError("--fix", what, "change it by hand") from error
    found = _KEY_IN_SECTION.search(text)
    writer.indent(mapping=len(found[1]) if found else 2, sequence=(offset or 0) + 2, offset=offset or 0)
    return writer, document


def _dumped(writer: Any, document: Any) -> str:
    out = io.StringIO()
    writer.dump(document, out)
    return out.getvalue()


def _set(document: Any, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    node, above = document, None
    for section in sections:
        if node.get(section) is None:
            if value is None:
                return
            node[section] = {}
        node, above = node[section], node
        if not hasattr(node, "keys"):
            raise UserError(key, f"{section} is {node!r} in the recipe, not a mapping", "change it there by hand")
    if value is not None:
        node[name] = value
    elif node.pop(name, None) is not None and not node and above is not None and sections[-1] not in _REQUIRED:
        del above[sections[-1]]


def _least_change(text: str, plain: str, after: str) -> str:
    """Lines that the writer merely formats in another way stay as they were, and so do comments on their own lines."""
    before, normal, new = (part.splitlines(keepends=True) for part in (text, plain, after))
    if len(before) != len(normal):
        return after
    made: list[str] = []
    for tag, start, stop, new_start, new_stop in SequenceMatcher(None, normal, new, autojunk=False).get_opcodes():
        if tag == "equal":
            made += before[start:stop]
        else:
            replacement = new[new_start:new_stop]
            made += [line for line in before[start:stop] if _only_comment(line) and line not in replacement]
            made += replacement
    return "".join(made)


def _only_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")
