"""Rows from a user's own ``file.py:function``."""

from __future__ import annotations

import importlib.util
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from packtrain.data.files import Chunk, missing_file, value_chunks
from packtrain.errors import UserError, nearest

COOKBOOK_PARAMETERS = ["dataset_config", "tokenizer", "split"]


def is_function(path: str) -> bool:
    """Whether ``path`` has the form ``file.py:function``."""
    file, colon, name = path.rpartition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier()


def function_chunks(path: str, split: str | None, tokenizer: Any) -> Iterator[Chunk]:
    """Call the function and take its rows.

    A function of ``(dataset_config, tokenizer, split)`` is llama-cookbook's ``get_custom_dataset``; any other
    takes ``split`` or nothing.

    Raises:
        UserError: the file or the function is missing, its code raises, or a row is no mapping.
    """
    file, _, name = path.rpartition(":")
    if not Path(file).is_file():
        raise missing_file(Path(file))
    with _reported(file):
        module = _load(Path(file))
    function = getattr(module, name, None)
    if not callable(function):
        close = nearest(name, [n for n, value in vars(module).items() if inspect.isfunction(value)])
        mend = f"did you mean {file}:{close}" if close else f"define it in {file}"
        raise UserError(path, f"there is no function '{name}' in {file}", mend)
    return value_chunks(path, enumerate(_rows(function, path, split, tokenizer), 1))


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"packtrain_user_{file.stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rows(function: Callable[..., Any], path: str, split: str | None, tokenizer: Any) -> Iterator[dict[str, Any]]:
    file = path.rpartition(":")[0]
    with _reported(file):
        rows = _call(function, path, split, tokenizer)
    if not isinstance(rows, Iterable):
        raise UserError(path, f"the function returned {type(rows).__name__}", "return an iterable of dicts")
    with _reported(file):
        iterator = iter(rows)
    number = 0
    while True:
        with _reported(file):
            row = next(iterator, None)
        if row is None:
            return
        number += 1
        if not hasattr(row, "keys"):
            raise UserError(f"{path}:row {number}", f"a row is {type(row).__name__}", "yield dicts")
        yield {key: row[key] for key in row.keys()}  # noqa: SIM118 - a BatchEncoding iterates otherwise


def _call(function: Callable[..., Any], path: str, split: str | None, tokenizer: Any) -> Any:
    parameters = inspect.signature(function).parameters
    if list(parameters)[:3] == COOKBOOK_PARAMETERS:
        config = SimpleNamespace(
            dataset="custom_dataset",
            name=path,
            file=path,
            train_split="train",
            test_split="test",
            data_path="",
        )
        return function(config, tokenizer, split or "train")
    required = [p for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(required) > 1:
        what = f"the function takes {', '.join(parameters)}"
        raise UserError(path, what, "let it take (split), nothing, or (dataset_config, tokenizer, split)")
    return function(split or "train") if required or "split" in parameters else function()


@contextmanager
def _reported(file: str) -> Iterator[None]:
    """Turn what the user's code raises into one sentence with the line at fault."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename).name == Path(file).name] or list(frames)
        line = error.lineno if isinstance(error, SyntaxError) else own[-1].lineno
        what = f"the data set's code raised {type(error).__name__}: {error}"
        raise UserError(f"{file}:{line}", what, "mend that line") from error
