"""The faults that a run must survive, as a table: docs/faults.md shows it, tests/dist/test_fault_matrix.py runs it.

``python -m tests.faults`` prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 12
SAVE_EVERY = 3


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and what must be seen of it.

    Attributes:
        kind: for ``tests.faulty_worker``, with the rank and the step.
        shown: the run's state afterwards, and words that its error or its warning must have.
        seconds: from the fault to the state.
        lost: steps that a resume does again, at most.
    """

    what: str
    kind: str
    state: str
    words: str
    seconds: float
    lost: int
    exit: int | None = 1
    recipe: tuple[str, ...] = ()


FAULTS = (
    Fault("SIGKILL of a rank", "kill:1:8", "failed", "rank 1 was killed by SIGKILL", 10, SAVE_EVERY),
    Fault("a rank leaves without a word", "leave:1:8", "failed", "rank 1 ended with exit status 7", 10, SAVE_EVERY),
    Fault("an exception on one rank", "raise:1:8", "failed", "ValueError: an odd row", 10, SAVE_EVERY),
    Fault("a rank is out of memory", "memory:1:8", "failed", "what frees most", 15, SAVE_EVERY),
    Fault("a rank hangs", "hang:1:8", "failed", "rank 1 hangs: it made no progress", 30, SAVE_EVERY),
    Fault("a rank is frozen (SIGSTOP)", "freeze:1:8", "failed", "it gave no sign of life", 30, SAVE_EVERY),
    Fault("SIGKILL of the supervisor", "kill_supervisor:1:8", "lost", "", 5, SAVE_EVERY, exit=-9),
    Fault("SIGTERM", "terminate:1:8", "stopped", "", 15, 0, exit=130),
    Fault("the disk is full before a save", "fill:0:8", "done", "no checkpoint at step 9", 30, 0, exit=0),
    Fault("the disk fills up during a save", "fill_late:0:8", "done", "no checkpoint at step 9", 30, 0, exit=0),
    Fault("the newest checkpoint is truncated", "kill:1:8", "failed", "", 10, 2 * SAVE_EVERY),
    Fault("a shard of the newest checkpoint is corrupted", "kill:1:8", "failed", "", 10, 2 * SAVE_EVERY),
    Fault("the port in MASTER_PORT is taken", "none:0:0", "done", "", 60, 0, exit=0),
    Fault("a node is lost (two nodes under torchrun)", "kill_agent:1:8", "failed", "peer", 20, SAVE_EVERY),
    Fault("clocks an hour apart between run and reader", "kill_supervisor:1:8", "lost", "", 20, SAVE_EVERY, exit=-9),
)  # fmt: skip


def table() -> str:
    """The table of docs/faults.md."""
    lines = ["| fault | seen within | state | what is said | steps done again |", "| --- | --- | --- | --- | --- |"]
    for fault in FAULTS:
        said = f"`{fault.words}`" if fault.words else ""
        lines.append(f"| {fault.what} | {fault.seconds:.0f} s | {fault.state} | {said} | {_lost(fault.lost)} |")
    return "\n".join(lines) + "\n"


def _lost(steps: int) -> str:
    if steps == 0:
        return "none"
    return "up to `checkpoint.every`" if steps == SAVE_EVERY else "up to two of `checkpoint.every`"


if __name__ == "__main__":
    print(table(), end="")
