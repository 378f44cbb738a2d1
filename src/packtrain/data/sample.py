"""A look at the first rows of a recipe's data: would they be read, rendered and learned from?"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from packtrain.config.schema import DataSection
from packtrain.data.files import Chunk, ValueChunk
from packtrain.data.prepare import Builder, read_reports
from packtrain.data.report import DataReport
from packtrain.data.sources import Source

ROWS = 100
"""Of each data set."""


def sample_data(
    data: DataSection, tokenizer_path: Path, max_length: int, add_tokens: Sequence[str] = (), rows: int = ROWS
) -> DataReport:
    """What becomes of the first ``rows`` rows of each data set. The cache is neither read nor written.

    Raises:
        UserError: as ``prepare_data``, of these rows.
    """
    build = Builder.of(data, tokenizer_path, max_length, add_tokens, sampled=True)
    report = DataReport([], max_length, data.packing, warnings=build.warnings)
    parts = {"train": data.train} | ({"eval": data.eval} if isinstance(data.eval, list) else {})
    with tempfile.TemporaryDirectory(prefix="packtrain-sample-") as scratch:
        for name, datasets in parts.items():
            folder = Path(scratch) / name
            build.build(folder, [_first(source, rows) for source in build.sources(datasets)])
            report.datasets += read_reports(folder, name)
    report.warnings += [text for dataset in report.datasets for text in dataset.all_warnings()]
    return report


def _first(source: Source, rows: int) -> Source:
    return replace(source, chunks=lambda: _first_chunks(source, rows))


def _first_chunks(source: Source, rows: int) -> Iterator[Chunk]:
    for chunk in source.chunks():
        if not rows:
            return
        if taken := list(itertools.islice(chunk.numbered(), rows)):
            rows -= len(taken)
            yield ValueChunk(chunk.file, [number for number, _ in taken], [row for _, row in taken], chunk.unit)
