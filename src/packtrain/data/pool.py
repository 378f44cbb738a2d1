"""Encoding in this process for small data, and in several for large."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

from packtrain.config.schema import Columns
from packtrain.data.drafts import Encoded, Job
from packtrain.data.encode import Encoder
from packtrain.data.files import CHUNK_BYTES, Chunk, LineChunk, ValueChunk
from packtrain.data.formats import Reader, choose_reader
from packtrain.data.sources import Source
from packtrain.inherited import die_with

# Below this, starting processes costs more than they save.
POOL_BYTES = 8 * CHUNK_BYTES
POOL_ROWS = 8000
FIRST_ROWS = 20


@dataclass(frozen=True)
class ReaderArguments:
    """What ``choose_reader`` is called with: readers are closures, which do not travel to a worker."""

    name: str
    columns: Columns
    prompt: str | None
    answer: str | None
    first: tuple[dict[str, object], ...]
    where: str

    def reader(self) -> Reader:
        """The reader itself."""
        return choose_reader(self.name, self.columns, self.prompt, self.answer, self.first, self.where)


def encode_source(source: Source, job: Job, workers: int) -> Iterator[Encoded]:
    """The chunks of a data set in order, encoded.

    Raises:
        UserError, SkeletonError: as ``Encoder.encode``.
    """
    chunks = iter(source.chunks())
    head = list(_until_large(chunks))
    numbered = itertools.chain.from_iterable(chunk.numbered() for chunk in head)
    first = tuple(values for _, values in itertools.islice(numbered, FIRST_ROWS))
    arguments = ReaderArguments(source.format, source.columns, source.prompt, source.answer, first, source.name)
    rest = next(chunks, None)
    if not first and rest is None:
        return
    if rest is None or workers == 1 or job.tokenizer.slow is not None:
        encoder, read = Encoder(job), arguments.reader()
        everything = itertools.chain(head, [rest] if rest else [], chunks)
        yield from (encoder.encode(chunk, read) for chunk in everything)
        return
    arguments.reader()  # an unknown format is reported before any process starts
    yield from _in_processes(itertools.chain(head, [rest], chunks), job, arguments, workers)


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _until_large(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """The first chunks, until they are worth a pool."""
    size = 0.0
    for chunk in chunks:
        yield chunk
        size += _share_of_pool(chunk)
        if size >= 1:
            return


def _share_of_pool(chunk: Chunk) -> float:
    if isinstance(chunk, ValueChunk):
        return len(chunk.values) / POOL_ROWS
    return (chunk.stop - chunk.start) / POOL_BYTES


def _in_processes(
    chunks: Iterable[LineChunk | ValueChunk], job: Job, arguments: ReaderArguments, workers: int
) -> Iterator[Encoded]:
    # Spawned, not forked: the tokenizers library's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (job, arguments)) as pool:
        waiting: deque[Future[Encoded]] = deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_encode, chunk))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


_worker: tuple[Encoder, Reader] | None = None


def _start_worker(job: Job, arguments: ReaderArguments) -> None:
    global _worker
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    die_with(parent.pid)  # else it would wait for rows for ever
    # One thread a worker: the workers are the parallelism. This is the worker's own environment.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = Encoder(job), arguments.reader()


def _encode(chunk: Chunk) -> Encoded:
    assert _worker
    encoder, read = _worker
    return encoder.encode(chunk, read)
