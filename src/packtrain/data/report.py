"""What became of the data: the report that is kept beside the tokens and shown by ``packtrain data``."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from packtrain.data.drafts import Encoded
from packtrain.data.packing import efficiency, pack
from packtrain.data.store import TokenStore

MAX_LISTED = 1000
PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}


@dataclass
class DatasetReport:
    """One data set. ``dropped`` lists ``(where, reason)`` of the first 1,000 dropped, ``reasons`` counts all.

    Args:
        part: train or eval.
        truncated, split: rows that ``overlong`` shortened or split; tokens_cut: tokens lost to max_length.
    """

    name: str
    part: str
    read: int = 0
    kept: int = 0
    truncated: int = 0
    split: int = 0
    tokens_cut: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    with_special: int = 0
    first_special: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def num_dropped(self) -> int:
        return sum(self.reasons.values())

    def add(self, encoded: Encoded) -> None:
        """Count a chunk."""
        self.read += encoded.counts["read"]
        self.kept += len(encoded.rows.lengths) if encoded.rows else 0
        self.truncated += encoded.counts["truncated"]
        self.split += encoded.counts["split"]
        self.tokens_cut += encoded.counts["tokens_cut"]
        counted = Counter(re.sub(r"\d+", "N", reason) for _, reason in encoded.faults)
        for reason, count in counted.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count
        room = MAX_LISTED - len(self.dropped)
        self.dropped += [(encoded.where(number), reason) for number, reason in encoded.faults[:room]]
        if encoded.special and not self.first_special:
            self.first_special = encoded.where(encoded.special[0])
        self.with_special += len(encoded.special)
        self.warnings += [warning for warning in encoded.warnings if warning not in self.warnings]

    def all_warnings(self) -> list[str]:
        """The warnings as sentences that name the data set."""
        texts = [f"{self.name}: {warning}" for warning in self.warnings]
        if self.with_special:
            what = f"{self.with_special} rows hold the text of a special token, which then counts as that token"
            texts.append(f"{self.name}: {what}; the first is {self.first_special}")
        return texts


@dataclass
class LengthReport:
    """Token lengths of one part's rows, and how they fill sequences of max_length.

    Args:
        percentiles: min, p50, p90, p95, p99 and max of tokens in a row.
        labelled: share of tokens that are learned.
        sequences: after packing, or rows without it; efficiency: real tokens over sequences * max_length.
    """

    rows: int
    tokens: int
    percentiles: dict[str, int]
    labelled: float
    sequences: int
    efficiency: float


@dataclass
class DataReport:
    """All of it. ``eval`` is None without evaluation data."""

    datasets: list[DatasetReport]
    max_length: int
    packing: bool
    train: LengthReport | None = None
    eval: LengthReport | None = None
    warnings: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """One sentence for each thing that a user should hear of before training."""
        found = list(self.warnings)
        for d in self.datasets:
            if d.dropped:
                where, reason = d.dropped[0]
                found.append(f"{d.name}: {d.num_dropped} of {d.read} rows dropped, the first at {where}: {reason}")
            if d.truncated or d.split:
                changed = f"{d.truncated} cut, {d.split} split"
                found.append(
                    f"{d.name}: rows longer than {self.max_length} tokens: {changed} ({d.tokens_cut} tokens lost)"
                )
        return found

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """From what ``to_json`` gave."""
        datasets = [dataset_from_json(entry) for entry in values["datasets"]]
        parts = {name: LengthReport(**values[name]) if values[name] else None for name in ("train", "eval")}
        return cls(**{**values, "datasets": datasets, **parts})


def dataset_from_json(values: dict[str, Any]) -> DatasetReport:
    """A ``DatasetReport`` from its plain values."""
    return DatasetReport(**{**values, "dropped": [(where, reason) for where, reason in values["dropped"]]})


def length_report(store: TokenStore, max_length: int, packing: bool) -> LengthReport:
    """Lengths and packing of the rows in ``store``."""
    tokens = int(store.lengths.sum())
    sequences = len(pack(store.lengths, max_length)) if packing else len(store)
    marks = np.percentile(store.lengths, list(PERCENTILES.values()), method="nearest")
    return LengthReport(
        rows=len(store),
        tokens=tokens,
        percentiles={name: int(mark) for name, mark in zip(PERCENTILES, marks, strict=True)},
        labelled=float(store.label_counts.sum()) / tokens,
        sequences=sequences,
        efficiency=efficiency(tokens, sequences, max_length),
    )
