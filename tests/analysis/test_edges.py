"""Logs as they also are: rotated, of older versions, of runs under several names, with gates that refuse."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from rich.console import Console

from lifecycle.analysis import (
    Warehouse,
    build_report,
    find_sources,
    find_violations,
    tell_story,
    to_parquet,
    write_trace,
)
from lifecycle.analysis.lines import each_line
from lifecycle.analysis.render import print_report, summary
from lifecycle.errors import ConfigurationError
from tests.analysis.conftest import Lines
from tests.analysis.faults import delivered_in_two_processes


def test_a_run_that_goes_on_under_another_name_is_one_story(
    good_lines: Lines, write: Callable[..., Path]
) -> None:
    """A process of another run that took rollouts over belongs to them: a second delivery there is found."""
    lines = copy.deepcopy(good_lines)
    process = next(line["process_id"] for line in reversed(lines) if line["event"] == "engine.started")
    for line in lines:
        if line["process_id"] == process:
            line["run_id"] = "resumed"
    with Warehouse(find_sources([write(lines)]), strict=True) as warehouse:
        assert find_violations(warehouse) == []
        assert {each.lineage for each in warehouse.processes} == {0}
        assert build_report(warehouse, [])["source"]["runs"] == 2
    at = delivered_in_two_processes(lines)
    lines[at]["run_id"] = lines[at - 1]["run_id"] = "resumed"
    with Warehouse(find_sources([write(lines)]), strict=True) as warehouse:
        assert [(found.kind, found.line) for found in find_violations(warehouse)] == [
            ("delivered_twice", at + 1)
        ]


def test_a_process_without_its_first_line_is_named_and_said_so(
    good_lines: Lines, write: Callable[..., Path]
) -> None:
    """A rotated log still knows who wrote it, and tells that the table is ours."""
    lines = [line for line in good_lines if line["event"] != "engine.started"]
    with Warehouse(find_sources([write(lines)])) as warehouse:
        report = build_report(warehouse)
    names = {process["process_id"] for process in report["source"]["processes"]}
    assert names == {line["process_id"] for line in good_lines}
    assert any("do not carry their table" in line for line in summary(report))


def test_a_table_that_is_none_is_replaced_by_ours(good_lines: Lines, write: Callable[..., Path]) -> None:
    """A first line with a table of another shape does not keep the rest from being read."""
    lines = copy.deepcopy(good_lines)
    for line in lines:
        if line["event"] == "engine.started":
            line["tables"] = {"rollout": {"arcs": []}}
    with Warehouse(find_sources([write(lines)]), strict=True) as warehouse:
        assert [machines.known for machines in warehouse.machines] == [False]
        assert find_violations(warehouse) == []


def test_parquet_of_an_older_version_lacks_columns(run_log: Path, tmp_path: Path) -> None:
    """Columns that a file does not have are empty, and the report is the same but for them."""
    to_parquet(find_sources([run_log]), tmp_path / "new.parquet")
    old = tmp_path / "old.parquet"
    duckdb.execute(
        f"COPY (SELECT * EXCLUDE (versions, kind, rids) FROM '{tmp_path / 'new.parquet'}') TO '{old}'"
    )
    with Warehouse(find_sources([old])) as warehouse:
        report = build_report(warehouse)
    with Warehouse(find_sources([run_log])) as warehouse:
        whole = build_report(warehouse)
    assert report["staleness"]["versions_per_rollout"] == []
    for section in ("rollouts", "transitions", "tokens", "groups"):
        assert report[section] == whole[section]


def test_parquet_of_something_else_is_refused(tmp_path: Path) -> None:
    """A file with other columns is no log; and Parquet is not converted twice."""
    other = tmp_path / "other.parquet"
    duckdb.execute(f"COPY (SELECT 1 AS x) TO '{other}'")
    with pytest.raises(ConfigurationError, match="it has no columns event, ts and process_id"):
        Warehouse(find_sources([other]))
    with pytest.raises(ConfigurationError, match="is Parquet already"):
        to_parquet(find_sources([other]), tmp_path / "again.parquet")


def test_zstandard_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any missing extra."""
    (tmp_path / "log.jsonl.zst").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rollout-lifecycle\[analysis\]'"):
        list(each_line(find_sources([tmp_path / "log.jsonl.zst"])[0]))


def test_a_log_that_vanished_is_said(tmp_path: Path) -> None:
    """The file was there when it was named, and is gone when it is read."""
    path = tmp_path / "log.jsonl"
    path.write_text("")
    sources = find_sources([path])
    path.unlink()
    with pytest.raises(ConfigurationError, match="cannot read the log"):
        Warehouse(sources)
    with pytest.raises(ConfigurationError, match="no log was named"):
        find_sources([])


def test_a_log_that_begins_with_noise_is_placed_by_its_first_good_line(
    good_lines: Lines, write: Callable[..., Path]
) -> None:
    """Garbage at the beginning of a file does not make it the oldest."""
    half = len(good_lines) // 2
    late = write(["noise"] * 3 + good_lines[half:], "a.jsonl")
    early = write(good_lines[:half], "b.jsonl")
    with Warehouse(find_sources([late, early])) as warehouse:
        assert [source.path for source in warehouse.sources] == [early, late]
        assert warehouse.damage.count == 3


def test_much_damage_is_counted_whole_and_shown_in_part(
    good_lines: Lines, write: Callable[..., Path]
) -> None:
    """Twenty places are enough to see what happened; the number is exact, and the summary says it."""
    path = write([*good_lines[:50], *["noise"] * 1500, *good_lines[50:]])
    with Warehouse(find_sources([path])) as warehouse:
        report = build_report(warehouse)
    assert report["damage"]["lines"] == 1500
    assert [shown["line"] for shown in report["damage"]["first"]] == list(range(51, 71))
    assert "1,500 damaged lines were left out, see below" in list(summary(report))


def test_many_files_are_named_in_part(split_log: list[Path]) -> None:
    """The summary names three and counts the rest."""
    with Warehouse(find_sources(split_log)) as warehouse:
        report = build_report(warehouse)
    assert f"and {len(split_log) - 3} more" in next(iter(summary(report)))
    console = Console(width=100, record=True, quiet=True)
    print_report(report, console)


def test_stories_and_traces_pass_over_damage_and_have_words_for_anomalies(
    good_lines: Lines, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Torn lines that name a rollout are left out; an anomaly is a sentence; a gate that stays is no event."""
    at, line = next((i, one) for i, one in enumerate(good_lines) if one.get("trigger") == "observe")
    rollout = line["rollout_id"]
    anomaly = {
        key: line[key] for key in ("v", "ts", "run_id", "process_id", "step", "rollout_id", "attempt", "rid")
    }
    anomaly |= {"event": "stream.anomaly", "kind": "late_event", "detail": "two tokens too late"}
    gate = next(one for one in good_lines if one["event"] == "gate.transition" and one["dest"] == "pausing")
    again = {**gate, "source": "pausing", "dest": "pausing"}
    where = good_lines.index(gate) + 1
    text: list[str] = [json.dumps(one) for one in good_lines]
    text.insert(where, json.dumps(again))
    text[at + 1 : at + 1] = [json.dumps(anomaly), json.dumps(line)[:-30]]
    path = write(text)
    story = "\n".join(map(str, tell_story(rollout, find_sources([path]))))
    assert "anomaly in attempt 1: late_event: two tokens too late" in story
    count = write_trace(find_sources([path]), tmp_path / "trace.json")
    clean = write_trace(find_sources([write(good_lines, "clean.jsonl")]), tmp_path / "clean.json")
    assert count == clean
    with Warehouse(find_sources([path]), strict=True) as warehouse:
        assert find_violations(warehouse) == []
        assert build_report(warehouse)["anomalies"][0]["kind"] == "late_event"


def test_the_number_of_threads_can_be_bounded(run_log: Path) -> None:
    """One thread says the same as many."""
    with Warehouse(find_sources([run_log]), threads=1) as one, Warehouse(find_sources([run_log])) as many:
        assert build_report(one)["tokens"] == build_report(many)["tokens"]
