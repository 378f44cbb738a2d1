"""Tokenised rows on disk, memory-mapped."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import orjson

from packtrain.data.files import place

TOKENS, LABELLED, META = "tokens.bin", "labelled.bin", "store.json"


@dataclass
class Rows:
    """Some rows, flat: what a worker returns and what the writer takes.

    Args:
        tokens: int32 ``(tokens,)``; labelled: bool ``(tokens,)``.
        lengths, label_counts: int ``(rows,)``; numbers: int ``(rows,)``, line or row numbers.
    """

    tokens: np.ndarray
    labelled: np.ndarray
    lengths: np.ndarray
    label_counts: np.ndarray
    numbers: np.ndarray


class RowsBuilder:
    """Collects rows, each given as runs of ids with one label flag a run."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._runs: list[int] = []
        self._flags: list[bool] = []
        self._rows: list[tuple[int, int, int]] = []

    def append(self, number: int, ids: list[list[int]], flags: list[bool]) -> bool:
        """Add a row, or return False where none of its tokens is learned. Its first token never is."""
        sizes = list(map(len, ids))
        first = next((flag for size, flag in zip(sizes, flags, strict=True) if size), False)
        labels = sum(compress(sizes, flags)) - first
        if labels <= 0:
            return False
        for run in ids:
            self._tokens.extend(run)
        self._runs += sizes
        self._flags += flags
        self._rows.append((number, sum(sizes), labels))
        return True

    def build(self) -> Rows:
        """The rows as arrays."""
        numbers, lengths, labels = np.array(self._rows, dtype=np.int64).reshape(-1, 3).T
        labelled = np.repeat(np.array(self._flags, dtype=np.bool_), np.array(self._runs, dtype=np.int64))
        labelled[np.cumsum(lengths) - lengths] = False
        return Rows(np.array(self._tokens, dtype=np.int32), labelled, lengths, labels, numbers)


class TokenStore:
    """Rows of tokens with their label mask and where they came from.

    Attributes:
        lengths: int32 ``(rows,)``, tokens of each row.
        label_counts: int32 ``(rows,)``, labelled tokens of each row.
        dataset: int16 ``(rows,)``, index of the recipe's data set.
    """

    def __init__(self, folder: Path, rows: np.ndarray | None = None) -> None:
        self.folder = folder
        self._files: list[tuple[str, str]] = [tuple(f) for f in orjson.loads((folder / META).read_bytes())["files"]]
        self._tokens = np.memmap(folder / TOKENS, dtype=np.int32, mode="r")
        self._labelled = np.memmap(folder / LABELLED, dtype=np.bool_, mode="r")
        offsets = np.load(folder / "offsets.npy")
        index = np.arange(len(offsets) - 1) if rows is None else rows
        self._index = index
        self._starts: np.ndarray = offsets[:-1][index]
        self._stops: np.ndarray = offsets[1:][index]
        self.lengths: np.ndarray = (self._stops - self._starts).astype(np.int32)
        self.label_counts: np.ndarray = np.load(folder / "label_counts.npy")[index]
        self.dataset: np.ndarray = np.load(folder / "dataset.npy")[index]
        self._file: np.ndarray = np.load(folder / "file.npy")[index]
        self._number: np.ndarray = np.load(folder / "number.npy")[index]

    @classmethod
    def open(cls, folder: Path | str) -> TokenStore:
        """Map the store in ``folder``."""
        return cls(Path(folder))

    def select(self, rows: np.ndarray) -> TokenStore:
        """The same store with only these rows, in this order; nothing is copied but the index."""
        return TokenStore(self.folder, self._index[rows])

    def __len__(self) -> int:
        return len(self._starts)

    def tokens(self, row: int) -> np.ndarray:
        """int32 ``(length,)``, a view."""
        return self._tokens[self._starts[row] : self._stops[row]]

    def labelled(self, row: int) -> np.ndarray:
        """bool ``(length,)``, a view: the tokens that are learned, as targets at their own position."""
        return self._labelled[self._starts[row] : self._stops[row]]

    def where(self, row: int) -> str:
        """``file:line`` or ``file:row N`` of a row."""
        file, unit = self._files[self._file[row]]
        return place(file, int(self._number[row]), unit)


class StoreWriter:
    """Writes a store under a temporary name; it gets its own name when it is whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.part = folder.with_name(folder.name + ".tmp")
        self._files: dict[tuple[str, str], int] = {}
        self._columns: dict[str, list[np.ndarray]] = {
            name: [] for name in ("lengths", "label_counts", "dataset", "file", "number")
        }

    def __enter__(self) -> StoreWriter:
        shutil.rmtree(self.part, ignore_errors=True)
        self.part.mkdir(parents=True)
        self._tokens: BinaryIO = open(self.part / TOKENS, "wb")
        self._labelled: BinaryIO = open(self.part / LABELLED, "wb")
        return self

    def append(self, rows: Rows, dataset: int, file: str, unit: str) -> None:
        """Add rows of one file of one data set."""
        count = len(rows.lengths)
        index = self._files.setdefault((file, unit), len(self._files))
        self._tokens.write(rows.tokens.astype(np.int32, copy=False).tobytes())
        self._labelled.write(rows.labelled.astype(np.bool_, copy=False).tobytes())
        added = (
            rows.lengths,
            rows.label_counts,
            np.full(count, dataset),
            np.full(count, index),
            rows.numbers,
        )
        for column, values in zip(self._columns.values(), added, strict=True):
            column.append(values)

    def attach(self, name: str, content: bytes) -> None:
        """Put another small file into the store's folder."""
        (self.part / name).write_bytes(content)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tokens.close()
        self._labelled.close()
        if error is not None:
            shutil.rmtree(self.part)
            return
        offsets = np.concatenate([[0], np.cumsum(_joined(self._columns.pop("lengths"), np.int64))])
        np.save(self.part / "offsets.npy", offsets)
        for name, dtype in (
            ("label_counts", np.int32),
            ("dataset", np.int16),
            ("file", np.int32),
            ("number", np.int64),
        ):
            np.save(self.part / f"{name}.npy", _joined(self._columns[name], dtype))
        (self.part / META).write_bytes(orjson.dumps({"files": list(self._files)}))
        self.part.rename(self.folder)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0), *parts]).astype(dtype)
