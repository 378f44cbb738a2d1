"""Files of rows: JSON, JSON lines, CSV and parquet, read in chunks that a worker process can be handed."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from packtrain.errors import UserError, first_sentence, listed, nearest

CHUNK_ROWS = 1000
CHUNK_BYTES = 1 << 20
EXTENSIONS = (".json", ".jsonl", ".ndjson", ".csv", ".parquet")
BOM = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """One row as it was read; ``where`` is ``file:line`` or ``file:row N``, both from 1."""

    values: dict[str, Any]
    where: str


class LineChunk(NamedTuple):
    """Whole lines of a JSONL file: bytes ``start`` to ``stop``, the first of which is line ``first``."""

    file: str
    start: int
    stop: int
    first: int
    unit: str = "line"

    def numbered(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line numbers and objects; blank lines are passed over.

        Raises:
            UserError: a line is not JSON, or not an object.
        """
        with open(self.file, "rb") as file:
            file.seek(self.start)
            lines = file.read(self.stop - self.start).split(b"\n")
        if self.start == 0 and lines[0].startswith(BOM):
            lines[0] = lines[0][len(BOM) :]
        for number, line in enumerate(lines, self.first):
            try:
                values = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if not line.strip():
                    continue
                raise _bad_line(f"{self.file}:{number}", line, error) from error
            if type(values) is not dict:
                raise _not_an_object(f"{self.file}:{number}", values)
            yield number, values


class ValueChunk(NamedTuple):
    """Rows that were already read, with their line or row numbers."""

    file: str
    numbers: list[int]
    values: list[dict[str, Any]]
    unit: str = "row"

    def numbered(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return zip(self.numbers, self.values, strict=True)


Chunk = LineChunk | ValueChunk


def place(file: str, number: int, unit: str) -> str:
    """``file:12`` for lines, ``file:row 12`` for anything else."""
    return f"{file}:{number}" if unit == "line" else f"{file}:row {number}"


def file_chunks(path: Path) -> Iterator[Chunk]:
    """The rows of one file, whichever its format.

    Raises:
        UserError: the file is missing, empty, of an unknown kind or not readable as what its name says.
    """
    check_file(path)
    readers = {".json": _json, ".csv": _csv, ".parquet": _parquet}
    return readers.get(path.suffix.lower(), _jsonl)(path)


def check_file(path: Path) -> None:
    """Refuse a path that is no readable, non-empty file of a known extension."""
    if not path.exists():
        raise missing_file(path)
    if path.is_dir():
        raise UserError(str(path), "is a folder, not a file", f"name a {listed(EXTENSIONS)} file in it")
    if path.suffix.lower() not in EXTENSIONS:
        what = f"files that end in '{path.suffix}' are not known"
        raise UserError(str(path), what, f"give a {listed(EXTENSIONS)} file")
    if path.stat().st_size == 0:
        raise UserError(str(path), "the file is empty", "give a file with at least one row")


def missing_file(path: Path) -> UserError:
    """The error for a file that is not there, offering the nearest name in its folder."""
    if not path.parent.is_dir():
        return UserError(str(path), f"no such file; the folder {path.parent} does not exist", "correct the path")
    close = nearest(path.name, [p.name for p in path.parent.iterdir()])
    mend = f"did you mean {path.parent / close}" if close else "correct the path"
    return UserError(str(path), "no such file", mend)


def value_chunks(file: str, rows: Iterable[tuple[int, dict[str, Any]]], unit: str = "row") -> Iterator[ValueChunk]:
    """Numbered rows in chunks of ``CHUNK_ROWS``."""
    rows = iter(rows)
    while part := list(itertools.islice(rows, CHUNK_ROWS)):
        numbers, values = zip(*part, strict=True)
        yield ValueChunk(file, list(numbers), list(values), unit)


def _jsonl(path: Path) -> Iterator[Chunk]:
    start, line = 0, 1
    with open(path, "rb") as file:
        while block := file.read(CHUNK_BYTES):
            block += file.readline() if not block.endswith(b"\n") else b""
            stop = start + len(block)
            # The newline that ends the chunk is left out, or the split would see one more, empty line.
            yield LineChunk(str(path), start, stop - block.endswith(b"\n"), line)
            start, line = stop, line + block.count(b"\n")


def _json(path: Path) -> Iterator[Chunk]:
    try:
        rows = orjson.loads(path.read_bytes().removeprefix(BOM))
    except orjson.JSONDecodeError as error:
        what = f"not valid JSON: {error.msg} (column {error.colno})"
        raise UserError(
            f"{path}:{error.lineno}", what, "mend that line, or name the file .jsonl if it is JSON lines"
        ) from error
    if not isinstance(rows, list):
        what = f"a JSON file must be an array of objects, this is {_kind(rows)}"
        raise UserError(str(path), what, "wrap its rows in [ ]")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise _not_an_object(f"{path}:row {number}", row)
    if not rows:
        raise UserError(str(path), "the array is empty", "give a file with at least one row")
    return value_chunks(str(path), enumerate(rows, 1))


def _csv(path: Path) -> Iterator[Chunk]:
    return value_chunks(str(path), _csv_rows(path), "line")


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(1 << 30)
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        line = 1
        try:
            names = next(reader)
            line = reader.line_num + 1
            for row in reader:
                if len(row) > len(names):
                    what = f"the row has {len(row)} fields, the header {len(names)}"
                    raise UserError(f"{path}:{line}", what, "quote fields that hold commas")
                if row:
                    yield line, dict(zip(names, row, strict=False))
                line = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{path}:{line}", f"not valid CSV: {error}", "mend that row's quotes") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{line}", "not UTF-8 text", "save the file as UTF-8") from error


def _parquet(path: Path) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(str(path), f"not a parquet file: {first_sentence(error)}", "write the file again") from error
    batches = (row for batch in file.iter_batches(CHUNK_ROWS) for row in batch.to_pylist())
    return value_chunks(str(path), enumerate(batches, 1))


def _bad_line(where: str, line: bytes, error: orjson.JSONDecodeError) -> UserError:
    if not line.rstrip().endswith(b"}"):
        what = f"the line is cut short or not a JSON object: {line.strip()[-40:].decode(errors='replace')!r}"
        return UserError(where, what, "write one whole JSON object a line, or delete that line")
    return UserError(where, f"not valid JSON: {error.msg} (column {error.colno})", "mend or delete that line")


def _not_an_object(where: str, value: Any) -> UserError:
    return UserError(where, f"a row must be an object, this is {_kind(value)}", 'write it as {"column": value}')


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
