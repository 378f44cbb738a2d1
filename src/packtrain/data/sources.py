"""From one ``Dataset`` entry of the recipe to its rows: a registered name, a file, a hub id or a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.config.schema import Columns, Dataset, FormatName
from packtrain.data.files import Chunk, Row, check_file, file_chunks, missing_file, place, value_chunks
from packtrain.data.functions import function_chunks, is_function
from packtrain.data.registry import MINIATURES, REGISTERED, Registered
from packtrain.errors import UserError, first_sentence, listed, nearest

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """A data set that was found: how to open it, and how its rows are read.

    Args:
        name: as the recipe writes it.
        format: ``auto`` where neither the entry, the recipe nor the registry says.
        answer: the answer's column, where the registry knows it.
        files: what its contents depend on, for the cache key.
        fingerprint: what they depend on besides.
        chunks: opens it.
    """

    name: str
    format: FormatName
    columns: Columns
    prompt: str | None
    answer: str | None
    files: tuple[Path, ...]
    fingerprint: str
    chunks: Callable[[], Iterator[Chunk]]


def find_source(dataset: Dataset, default_format: FormatName = "auto", tokenizer: Any = None) -> Source:
    """Find a data set, by name first, then on disk, then on the hub.

    Args:
        tokenizer: handed to functions of llama-cookbook's form.

    Raises:
        UserError: nothing of that name exists, or it cannot be opened.
    """
    known = None if Path(dataset.path).is_file() else REGISTERED.get(dataset.path)
    files, fingerprint, chunks = _locate(dataset, known, tokenizer)
    format_name = dataset.format if dataset.format != "auto" else default_format
    if known and dataset.format == "auto":
        format_name = "alpaca" if known.prompt is None else "auto"
    return Source(
        name=dataset.path,
        format=format_name,
        columns=dataset.columns,
        prompt=dataset.prompt or (known.prompt if known else None),
        answer=known.answer if known else None,
        files=files,
        fingerprint=fingerprint,
        chunks=chunks,
    )


def rows(source: Source) -> Iterator[Row]:
    """Every row of a source, with where it stands."""
    for chunk in source.chunks():
        for number, values in chunk.numbered():
            yield Row(values, place(chunk.file, number, chunk.unit))


Located = tuple[tuple[Path, ...], str, Callable[[], Iterator[Chunk]]]


def _locate(dataset: Dataset, known: Registered | None, tokenizer: Any) -> Located:
    path = Path(dataset.path)
    if known and known.hub is None:
        return _miniature(dataset)
    if known and known.hub:
        split = dataset.split or "train"
        return _hub(known.hub, known.splits.get(split, split), dataset.path)
    if is_function(dataset.path):
        file = Path(dataset.path.rpartition(":")[0])
        files = (file,) if file.is_file() else ()
        return (
            files,
            f"function {dataset.split}",
            lambda: function_chunks(dataset.path, dataset.split, tokenizer),
        )
    if path.exists():
        check_file(path)
        return (path,), "file", lambda: file_chunks(path)
    if HUB_ID.fullmatch(dataset.path) and not path.suffix and not path.parent.is_dir():
        return _hub(dataset.path, dataset.split or "train", dataset.path)
    raise _nothing(dataset.path)


def _miniature(dataset: Dataset) -> Located:
    split = dataset.split or "train"
    path = MINIATURES / f"{dataset.path}.{split}.jsonl"
    if not path.is_file():
        raise UserError(dataset.path, f"there is no split '{split}'", "choose train or test")
    return (path,), "file", lambda: file_chunks(path)


def _nothing(path: str) -> UserError:
    if "/" in path or Path(path).suffix:
        return missing_file(Path(path))
    close = nearest(path, REGISTERED)
    mend = f"did you mean {close}" if close else f"choose {listed(REGISTERED)}, or give a path"
    what = "not a registered data set, and neither a file nor a hub id of the form owner/name"
    return UserError(f"data set '{path}'", what, mend)


def _hub(hub_id: str, split: str, name: str) -> Located:
    try:
        import datasets
    except ImportError as error:
        what = f"reading {hub_id} from the hub needs the datasets package"
        raise UserError(f"data set '{name}'", what, "pip install 'packtrain[hub]'") from error
    try:
        table = datasets.load_dataset(hub_id, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        what = f"{hub_id} (split {split}) could not be loaded: {first_sentence(error)}"
        mend = "check the id, the split and the connection, or download it and give the file's path"
        raise UserError(f"data set '{name}'", what, mend) from error
    chunks = lambda: value_chunks(name, enumerate(table, 1))  # noqa: E731
    return (), f"hub {hub_id} {split} {table._fingerprint}", chunks
