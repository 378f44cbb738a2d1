"""From the recipe's data section to tokenised rows: ``prepare_data``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson

from packtrain.config.schema import DataSection, Dataset
from packtrain.data.cache import build_once, data_key, data_root
from packtrain.data.drafts import Encoded, Job, SkeletonError
from packtrain.data.pool import encode_source, usable_cores
from packtrain.data.report import DataReport, DatasetReport, dataset_from_json, length_report
from packtrain.data.sources import Source, find_source
from packtrain.data.store import StoreWriter, TokenStore
from packtrain.data.template import choose_template
from packtrain.data.tokenizer import added_tokens, check_vocabulary, load_tokenizer, parts_of, vocabulary_size
from packtrain.errors import UserError

Progress = Callable[[int, int | None], None]
REPORT = "report.json"


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data. ``template`` is the text of the chat template that was used."""

    train: TokenStore
    eval: TokenStore | None
    report: DataReport
    template: str


def prepare_data(
    data: DataSection, tokenizer_path: Path, max_length: int, seed: int, progress: Progress | None = None,
    add_tokens: Sequence[str] = (),
) -> PreparedData:  # fmt: skip
    """Read, check and tokenise the data of a recipe, or take it from the cache.

    Args:
        tokenizer_path: the model's folder.
        max_length: tokens of a row at most.
        seed: chooses the rows held out where ``data.eval`` is a share.
        progress: called with the rows done so far and their number, None where unknown.
        add_tokens: ``model.add_tokens``.

    Raises:
        UserError: a data set is missing or malformed, or no row of it can be used.
    """
    build = Builder.of(data, tokenizer_path, max_length, add_tokens, progress)
    train, reports = build.part(data.train, "train")
    held_out: TokenStore | None = None
    if isinstance(data.eval, list):
        held_out, eval_reports = build.part(data.eval, "eval")
        reports += eval_reports
    elif data.eval > 0 and len(train) > 1:
        train, held_out = hold_out(train, data.eval, seed)
    report = DataReport(reports, max_length, data.packing)
    report.train = length_report(train, max_length, data.packing)
    report.eval = length_report(held_out, max_length, data.packing) if held_out else None
    report.warnings = build.warnings + [text for dataset in reports for text in dataset.all_warnings()]
    return PreparedData(train, held_out, report, build.template)


def hold_out(store: TokenStore, share: float, seed: int) -> tuple[TokenStore, TokenStore]:
    """Split rows into the rest and a share of them, at least one on each side, by a hash of seed and row."""
    count = min(max(round(share * len(store)), 1), len(store) - 1)
    ranks = np.argsort(_hashes(len(store), seed), kind="stable")
    chosen = np.zeros(len(store), dtype=np.bool_)
    chosen[ranks[:count]] = True
    return store.select(np.flatnonzero(~chosen)), store.select(np.flatnonzero(chosen))


def _hashes(count: int, seed: int) -> np.ndarray:
    """A splitmix64 hash of each row index, uint64 ``(count,)``."""
    start = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Builder:
    """Encodes one part of the data (train or eval) into one store.

    Args:
        vocabulary: rows of the model's embedding; None: not known. warnings: about the template.
        sampled: whether a data set's first rows stand for all of them.
    """

    def __init__(
        self, data: DataSection, job: Job, tokenizer: Any, vocabulary: int | None, warnings: list[str],
        progress: Progress | None = None, sampled: bool = False,
    ) -> None:  # fmt: skip
        self._data, self._job, self._tokenizer, self._progress = data, job, tokenizer, progress
        self._vocabulary, self._sampled = vocabulary, sampled
        self._workers = usable_cores() if data.workers == "auto" else int(data.workers)
        self.warnings, self.template = warnings, job.template

    @classmethod
    def of(
        cls, data: DataSection, tokenizer_path: Path, max_length: int, add_tokens: Sequence[str],
        progress: Progress | None = None, sampled: bool = False,
    ) -> Self:  # fmt: skip
        """For the data and the tokenizer of a recipe; arguments and errors as of ``prepare_data``."""
        config_file = Path(tokenizer_path) / "config.json"
        tokenizer = load_tokenizer(tokenizer_path)
        check_vocabulary(tokenizer, config_file)
        added, vocabulary = added_tokens(tokenizer_path, add_tokens), vocabulary_size(config_file)
        if added and vocabulary is not None:
            vocabulary = max(vocabulary, added.end)
        if added:
            tokenizer = load_tokenizer(tokenizer_path, add_tokens)
        template, warning = choose_template(data.template, tokenizer)
        job = Job(parts_of(tokenizer), template, max_length, data.overlong, data.train_on)
        return cls(data, job, tokenizer, vocabulary, [warning] if warning else [], progress, sampled)

    def sources(self, datasets: Sequence[Dataset]) -> list[Source]:
        """Where the rows of some data sets come from."""
        return [find_source(dataset, self._data.format, self._tokenizer) for dataset in datasets]

    def part(self, datasets: Sequence[Dataset], name: str) -> tuple[TokenStore, list[DatasetReport]]:
        """The store of some data sets, from the cache where it is there, and a report for each."""
        sources = self.sources(datasets)
        root = data_root(self._data.cache)
        files = [file for source in sources for file in source.files]
        folder = root / data_key(root, files, self._settings(sources))
        build_once(folder, lambda folder: self.build(folder, sources))
        return TokenStore.open(folder), read_reports(folder, name)

    def _settings(self, sources: Sequence[Source]) -> dict[str, Any]:
        job = asdict(replace(self._job, rendered=frozenset()))
        job["tokenizer"]["slow"] = repr(self._job.tokenizer.slow)
        job["rendered"] = []
        entries = [
            [s.name, s.format, s.columns.model_dump(), s.prompt, s.answer, s.fingerprint, len(s.files)] for s in sources
        ]
        return {"job": job, "sources": entries, "vocabulary": self._vocabulary}

    def build(self, folder: Path, sources: Sequence[Source]) -> None:
        """Make the store of some sources, with their reports in it."""
        while True:
            try:
                return self._write(folder, sources)
            except SkeletonError as broken:
                self._job = replace(self._job, rendered=self._job.rendered | {broken.roles})

    def _write(self, folder: Path, sources: Sequence[Source]) -> None:
        reports = [DatasetReport(source.name, "") for source in sources]
        done = 0
        with StoreWriter(folder) as writer:
            for index, (source, report) in enumerate(zip(sources, reports, strict=True)):
                for encoded in encode_source(source, self._job, self._workers):
                    report.add(encoded)
                    assert encoded.rows
                    self._check_ids(encoded)
                    writer.append(encoded.rows, index, encoded.file, encoded.unit)
                    done += encoded.counts["read"]
                    if self._progress:
                        self._progress(done, None)
                _require_rows(report, "first " if self._sampled else "")
            writer.attach(REPORT, orjson.dumps([asdict(report) for report in reports]))

    def _check_ids(self, encoded: Encoded) -> None:
        """Ready-made rows may hold ids that the model has no embedding for; a tokenizer's own cannot."""
        assert encoded.rows
        tokens = encoded.rows.tokens
        if self._vocabulary is None or not len(tokens) or 0 <= tokens.min() <= tokens.max() < self._vocabulary:
            return
        at = int(np.flatnonzero((tokens < 0) | (tokens >= self._vocabulary))[0])
        row = int(np.searchsorted(np.cumsum(encoded.rows.lengths), at, side="right"))
        what = f"token id {int(tokens[at])} of input_ids is not below the model's vocab_size {self._vocabulary}"
        raise UserError(encoded.where(int(encoded.rows.numbers[row])), what, "tokenise with the model's own tokenizer")


def read_reports(folder: Path, part: str) -> list[DatasetReport]:
    """What was kept in a store about the data sets that it was made of."""
    values = orjson.loads((folder / REPORT).read_bytes())
    return [replace(dataset_from_json(entry), part=part) for entry in values]


def _require_rows(report: DatasetReport, which: str) -> None:
    if report.kept:
        return
    if not report.read:
        raise UserError(f"data set '{report.name}'", "it has no rows", "give a file with at least one row")
    where, reason = report.dropped[0]
    what = f"none of the {which}{report.read} rows of '{report.name}' can be used, the first because: {reason}"
    raise UserError(where, what, _mend(reason))


def _mend(reason: str) -> str:
    if "max_length" in reason:
        return "raise data.max_length, or choose another data.overlong"
    if "column" in reason:
        return "correct the file, or set this data set's `format`, `columns` or `prompt`"
    if "learned" in reason:
        return "label at least one token, or set data.train_on to all"
    return "correct the rows, or set this data set's `format`"
