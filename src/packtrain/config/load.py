"""From a YAML file and ``key.path=value`` words to a checked ``Recipe``; each fault becomes one sentence."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from packtrain.config.schema import Recipe
from packtrain.errors import UserError, first_sentence, listed, nearest

Location = tuple[str | int, ...]
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML would settle in silence."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:
            raise yaml.MarkedYAMLError(problem="`<<` is not taken here", problem_mark=key_node.start_mark)
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool | None):
            raise yaml.MarkedYAMLError(problem="a key must be a plain word", problem_mark=key_node.start_mark)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"'{key}' is given twice", problem_mark=key_node.start_mark)
        seen.add(key)
    return {loader.construct_object(k, deep=True): loader.construct_object(v, deep=True) for k, v in node.value}


def _parsed(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply ``key.path=value`` words to it.

    Raises:
        UserError: the file is missing or not YAML, a key is unknown, or a value is wrong.
    """
    return parse_recipe(read_text(Path(path)), overrides, str(path))


def parse_recipe(text: str, overrides: Sequence[str] = (), source: str = "recipe") -> Recipe:
    """The recipe that a YAML text says, with ``key.path=value`` words applied to it.

    Args:
        source: the file that the text is from.

    Raises:
        UserError: as ``load_recipe``.
    """
    try:
        values = _parsed(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{source}:{line}", f"not valid YAML: {error.problem}", "mend that line") from error
    except yaml.YAMLError as error:
        raise UserError(source, f"not valid YAML: {first_sentence(error)}", "write it as plain UTF-8 text") from error
    if values is None:
        raise UserError(source, "the recipe is empty", "give at least model.path and data.train")
    if not isinstance(values, dict):
        raise UserError(source, f"a recipe is a mapping, this is a {type(values).__name__}", "start with `model:`")
    return build_recipe(values, overrides, source=source, lines=_line_numbers(text))


def build_recipe(
    values: dict[str, Any],
    overrides: Sequence[str] = (),
    source: str = "recipe",
    lines: dict[Location, int] | None = None,
) -> Recipe:
    """Check a mapping, after ``overrides``, against the schema."""
    given: set[Location] = set()
    for word in overrides:
        given.add(_apply_override(values, word))
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise _sentence(error, values, source, lines or {}, given) from None


def read_text(path: Path) -> str:
    """The text of a small UTF-8 file, with or without a byte-order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(str(path), "no such file", "check the path") from None
    except (IsADirectoryError, PermissionError, OSError) as error:
        raise UserError(str(path), f"cannot be read ({error.strerror})", "give a readable file") from error
    except UnicodeDecodeError as error:
        raise UserError(str(path), f"not UTF-8 text (byte {error.start})", "save it as UTF-8") from error


def _apply_override(values: dict[str, Any], word: str) -> Location:
    key, equals, raw = word.partition("=")
    if not equals or not key:
        raise UserError(word, "not of the form key.path=value", "write it like train.epochs=1")
    try:
        value = _parsed(raw)
    except yaml.YAMLError as error:
        raise UserError(word, "the value is not valid YAML", "put it in quotes") from error
    location = tuple(key.split("."))
    node = values
    for part in location[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            child = node[part] = {}
        node = child
    node[location[-1]] = value
    return location


def _line_numbers(text: str) -> dict[Location, int]:
    """Line of each key and list entry of a YAML document."""
    found: dict[Location, int] = {}

    def visit(node: yaml.Node | None, at: Location) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = (*at, key.value)
                found[inner] = key.start_mark.line + 1
                visit(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                found[(*at, i)] = value.start_mark.line + 1
                visit(value, (*at, i))

    visit(yaml.compose(text, Loader=yaml.SafeLoader), ())
    return found


def _sentence(
    error: ValidationError, values: dict[str, Any], source: str, lines: dict[Location, int], given: set[Location]
) -> UserError:
    """One sentence for the first fault; the alternatives of a union are folded into one."""
    faults = error.errors(include_url=False)
    location = _real_location(faults[0], values)
    same = [f for f in faults if _real_location(f, values) == location]
    key = ".".join(str(part) for part in location)
    if any(location[: len(g)] == g for g in given):
        where = f"command line: {key}"
    else:
        line = next((lines[location[:n]] for n in range(len(location), 0, -1) if location[:n] in lines), None)
        where = f"{source}:{line}: {key}" if line else f"{source}: {key}"
    fault = same[0]
    if fault["type"] == "extra_forbidden":
        names = _known_names(location[:-1])
        guess = nearest(str(location[-1]), names)
        mend = f"did you mean '{guess}'" if guess else f"the keys here are {listed(names)}"
        return UserError(where, f"unknown key '{location[-1]}'", mend)
    if fault["type"] == "missing":
        return UserError(where, "is missing", f"give {key}")
    value = fault["input"]
    return UserError(where, f"{value!r} is not allowed", f"give {_listed(same)}")


def expected(error: ValidationError) -> str:
    """What one setting takes, from the error that another value caused."""
    return _listed(error.errors(include_url=False))


def _listed(faults: list[ErrorDetails]) -> str:
    return listed(dict.fromkeys(expectation(fault) for fault in faults))


def _real_location(fault: ErrorDetails, values: Any) -> Location:
    """Pydantic's location without the labels it adds for the branches of a union."""
    location: list[str | int] = []
    node: Any = values
    for part in fault["loc"]:
        if isinstance(node, dict) and (part in node or (fault["type"] == "missing" and part == fault["loc"][-1])):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part] if part < len(node) else None
        else:
            continue
        location.append(part)
    return tuple(location)


def expectation(fault: ErrorDetails) -> str:
    """What a setting takes, from what pydantic found wrong with another value."""
    context = fault.get("ctx", {})
    phrases = {
        "literal_error": lambda: str(context["expected"]).replace("'", ""),
        "greater_than_equal": lambda: f"a number of at least {context['ge']}",
        "greater_than": lambda: f"a number above {context['gt']}",
        "less_than_equal": lambda: f"a number of at most {context['le']}",
        "less_than": lambda: f"a number below {context['lt']}",
        "int_parsing": lambda: "a whole number",
        "int_type": lambda: "a whole number",
        "int_from_float": lambda: "a whole number",
        "float_parsing": lambda: "a number",
        "float_type": lambda: "a number",
        "bool_parsing": lambda: "true or false",
        "bool_type": lambda: "true or false",
        "string_type": lambda: "a text",
        "finite_number": lambda: "a finite number",
        "list_type": lambda: "a list",
        "dict_type": lambda: "a mapping",
        "model_type": lambda: "a mapping",
        "model_attributes_type": lambda: "a mapping",
        "too_short": lambda: "at least one entry",
        "string_pattern_mismatch": lambda: f"a text of the form {context['pattern']}",
        "value_error": lambda: "a number or a name from the reference",
    }
    phrase = phrases.get(fault["type"])
    return phrase() if phrase else fault["msg"].lower()


def _known_names(section: Iterable[str | int]) -> list[str]:
    """The field names of the section at this location of the schema."""
    model: type[BaseModel] = Recipe
    for part in section:
        if isinstance(part, int):
            continue
        model = next(iter(_models_in(model.model_fields[part].annotation)), model)
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) or isinstance(annotation, types.UnionType):
        return [m for a in typing.get_args(annotation) for m in _models_in(a)]
    return []


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, every default written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
