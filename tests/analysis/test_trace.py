from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from lifecycle.analysis import find_sources, write_trace
from lifecycle.errors import ConfigurationError
from tests.analysis.conftest import Lines

Event = dict[str, Any]
KEYS = {
    "b": {"ph", "cat", "id2", "name", "pid", "tid", "ts", "args"},
    "e": {"ph", "cat", "id2", "name", "pid", "tid", "ts"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "M": {"ph", "name", "pid", "tid", "args"},
}


@pytest.fixture(scope="module")
def events(run_log: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """The trace of the good run, as a trace viewer would load it."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    count = write_trace(find_sources([run_log]), path)
    trace = json.loads(path.read_text())
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    assert len(trace["traceEvents"]) == count
    return list(trace["traceEvents"])


def test_every_event_has_the_keys_of_the_trace_event_format(events: list[Event]) -> None:
    """Phases, types and keys are those that the format asks for."""
    for event in events:
        assert set(event) == KEYS[event["ph"]], event
        assert isinstance(event["pid"], int)
        if "ts" in event:
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0
        if event["ph"] in "be":
            assert set(event["id2"]) == {"local"}
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    assert {event["ph"] for event in events} == {"b", "e", "C", "M"}


def test_pairs_nest_and_never_overlap(events: list[Event]) -> None:
    """Within one id of one process every begin has its end, and no two pairs overlap: viewers would mix them up."""
    tracks: dict[tuple[int, str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            tracks[event["pid"], event["cat"], event["id2"]["local"]].append(event)
    for track in tracks.values():
        assert len(track) % 2 == 0
        for begin, end in zip(track[::2], track[1::2], strict=True):
            assert (begin["ph"], end["ph"]) == ("b", "e")
            assert begin["name"] == end["name"]
            assert begin["ts"] <= end["ts"]
        for end, begin in zip(track[1::2], track[2::2], strict=False):
            assert end["ts"] <= begin["ts"]


def test_each_worker_is_a_process_with_its_attempts(events: list[Event], good_lines: Lines) -> None:
    """Streams stand under the worker that served them, waiting under the engine."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    workers = {line["worker"] for line in good_lines if line.get("worker") and "trigger" in line}
    assert workers | {"engine"} <= set(names.values())
    for event in events:
        if event["ph"] == "b" and event["cat"] == "rollout":
            waits = event["name"] == "pending"
            assert (names[event["pid"]] == "engine") == waits, event
    partial = sum(1 for event in events if event["ph"] == "b" and event["name"] == "partial")
    assert partial == sum(line.get("trigger") == "observe" for line in good_lines)


def test_what_was_cut_off_is_closed_and_marked(events: list[Event]) -> None:
    """Rollouts in flight when a process died end with the log, marked as cut off."""
    assert any(event.get("args", {}).get("cut_off") for event in events if event["ph"] == "b")


def test_counters_follow_the_load(events: list[Event]) -> None:
    """Requests in flight rise and come back to nothing; tokens per second are counted."""
    in_flight = [event["args"]["requests"] for event in events if event.get("name") == "in flight"]
    assert max(in_flight) > 10
    assert any(event["args"]["tokens"] > 0 for event in events if event.get("name") == "tokens per second")


def test_several_files_make_one_trace(split_log: list[Path], run_log: Path, tmp_path: Path) -> None:
    """The files of several processes are merged by time into what one file gives."""
    write_trace(find_sources(split_log), tmp_path / "split.json")
    write_trace(find_sources([run_log]), tmp_path / "one.json")
    assert (tmp_path / "split.json").read_bytes() == (tmp_path / "one.json").read_bytes()


def test_a_place_that_cannot_be_written_is_named(run_log: Path, tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(ConfigurationError, match="cannot write the trace"):
        write_trace(find_sources([run_log]), tmp_path / "nowhere" / "trace.json")
