from __future__ import annotations

import json
from pathlib import Path

from packtrain.metrics.reader import EventReader, last_events, read_events


def line(step: int) -> str:
    return json.dumps({"event": "step", "step": step, "loss": 1.0}) + "\n"


def test_each_event_once_and_half_a_line_later(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.poll() == []
    whole = line(2)
    path.write_text(line(1) + whole[:9])
    assert [event["step"] for event in reader.poll()] == [1]
    assert reader.poll() == []
    with path.open("a") as file:
        file.write(whole[9:] + line(3))
    assert [event["step"] for event in reader.poll()] == [2, 3]
    assert reader.num_damaged == 0


def test_half_a_line_of_a_crash_is_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line(1) + '{"event": "st\n' + '"text"\n' + line(2))
    reader = EventReader(path)
    assert [event["step"] for event in reader.poll()] == [1, 2]
    assert reader.num_damaged == 2


def test_half_a_character_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    data = json.dumps({"event": "warning", "message": "müde"}, ensure_ascii=False).encode() + b"\n"
    at = data.index(b"\xc3") + 1
    path.write_bytes(data[:at])
    reader = EventReader(path)
    assert reader.poll() == []
    with path.open("ab") as file:
        file.write(data[at:])
    assert reader.poll()[0]["message"] == "müde"


def test_from_end_shows_only_what_comes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line(1))
    reader = EventReader(path, from_end=True)
    with path.open("a") as file:
        file.write(line(2))
    assert [event["step"] for event in reader.poll()] == [2]


def test_last_events_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert last_events(path) == {}
    start = '{"event": "start", "total_steps": 5000}\n'
    path.write_text(start + "".join(line(step) for step in range(5000)) + '{"event": "step", "st')
    assert last_events(path)["step"]["step"] == 4999
    assert last_events(path)["start"]["total_steps"] == 5000
    assert len(read_events(path)) == 5001


def test_events_that_lack_what_they_are_about_are_no_events(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    whole = {"event": "step", "step": 1, "loss": 2.0}
    lines = ["garbage{", "null", "[]", '{"event": "step"}', '{"event": "eval", "step": 3}', '{"event": 7}']
    file.write_bytes(b"\xff\xfe\n" + "\n".join([*lines, json.dumps(whole), ""]).encode())
    reader = EventReader(file)
    assert reader.poll() == [whole] and reader.num_damaged == 7
