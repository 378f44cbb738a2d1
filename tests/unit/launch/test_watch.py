"""Who hangs, judged by beats: never one that waits, compiles, saves, or is as slow as it always was."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from packtrain.launch.pulse import Beat, Pulse, read_beat
from packtrain.launch.watch import HangWatch

WAITS = Beat(1, "step", 21.0, 0.5, "waits", "c10d.py:1 (wait)")
STUCK = replace(WAITS, doing="elsewhere", place="rows.py:7 (read)")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(tmp_path: Path, clock: Clock) -> HangWatch:
    return HangWatch([tmp_path / f"rank-{rank}.beat" for rank in range(3)], 20.0, clock)


def write(watch: HangWatch, *beats: Beat | None) -> None:
    for path, beat in zip(watch.paths, beats, strict=True):
        if beat is not None:
            path.write_text(json.dumps(asdict(beat)))


def test_the_one_that_others_wait_for(watch: HangWatch) -> None:
    write(watch, WAITS, STUCK, WAITS)
    assert watch.hung() == (1, "made no progress for 21 s, at rows.py:7 (read)")


@pytest.mark.parametrize(
    "beats",
    [
        (WAITS, WAITS, WAITS),  # a link is slow: launch.timeout is for that
        (WAITS, STUCK, STUCK),  # two at it: not each other's fault
        (WAITS, replace(STUCK, quiet=19.0), WAITS),
        (WAITS, replace(STUCK, longest=5.0), WAITS),  # it was quiet for as long before
        (WAITS, replace(STUCK, phase="saving"), WAITS),
        (WAITS, replace(STUCK, phase="first step"), WAITS),
        (WAITS, replace(STUCK, doing="compiles"), WAITS),
        (WAITS, STUCK, None),  # one has not begun
    ],
)
def test_no_false_alarm(watch: HangWatch, beats: tuple[Beat | None, ...]) -> None:
    write(watch, *beats)
    assert watch.hung() is None


def test_no_new_beats(watch: HangWatch, clock: Clock) -> None:
    write(watch, WAITS, WAITS, replace(WAITS, phase="saving"))
    assert watch.hung() is None
    clock.now = 15.0
    write(watch, replace(WAITS, number=2), WAITS, replace(WAITS, phase="saving"))
    assert watch.hung() is None
    clock.now = 21.0
    assert watch.hung() == (1, "gave no sign of life for 21 s")
    write(watch, replace(WAITS, number=3), replace(WAITS, number=2), replace(WAITS, phase="saving"))
    assert watch.hung() is None  # outside of a step it may take its time
    clock.now = 61.0
    write(watch, replace(WAITS, number=4), replace(WAITS, number=3), replace(WAITS, phase="saving"))
    assert watch.hung() == (2, "gave no sign of life for 61 s")


def test_alone_it_may_compute_as_long_as_it_likes(tmp_path: Path) -> None:
    watch = HangWatch([tmp_path / "rank-0.beat"], 20.0)
    write(watch, replace(STUCK, doing="computes"))
    assert watch.hung() is None
    write(watch, replace(STUCK, number=2))
    assert watch.hung() is not None


def test_pulse_tells_phase_pauses_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.launch.pulse.BEAT_SECONDS", 0.05)
    calls: list[int] = []
    path = tmp_path / "rank-0.beat"
    with Pulse(path, [lambda: calls.append(1)]) as pulse:
        phases = []
        for phase in (None, "step", None, "step", None, "saving"):
            pulse(phase)
            time.sleep(0.2)
            beat = read_beat(path)
            assert beat is not None
            phases.append(beat.phase)
        assert phases == ["loading", "first step", "first step", "step", "step", "saving"]
        assert 0.15 < beat.longest < 1.0 and beat.doing == "elsewhere" and "test_watch.py" in beat.place
    assert read_beat(path) is None and calls


def test_an_action_that_fails_does_not_end_the_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("packtrain.launch.pulse.BEAT_SECONDS", 0.02)

    def fail() -> None:
        raise OSError(116, "Stale file handle")

    with Pulse(tmp_path / "beat", [fail]):
        time.sleep(0.3)
        beat = read_beat(tmp_path / "beat")
    assert beat is not None and beat.number > 3
    assert capsys.readouterr().err.count("Stale file handle") == 1


def test_a_new_phase_is_told_at_once(tmp_path: Path) -> None:
    with Pulse(tmp_path / "beat") as pulse:
        for phase in ("step", "step", "saving"):
            pulse(phase)
        deadline = time.monotonic() + 0.5
        while (beat := read_beat(tmp_path / "beat")) is None or beat.phase != "saving":
            assert time.monotonic() < deadline
    assert not any(thread.name == "pulse" for thread in threading.enumerate())
