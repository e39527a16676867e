from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from rich.console import Console

from benchmarks.generate_log import write_log
from lifecycle.analysis import Report, Warehouse, build_report, find_sources, find_violations
from lifecycle.analysis.render import print_report
from lifecycle.analysis.warehouse import PEEKED
from lifecycle.analysis.words import clock, path_of, seconds, share
from lifecycle.errors import ConfigurationError
from lifecycle.log import LogLine, read_log
from lifecycle.log.records import RolloutRecord, RolloutRestored, RolloutTransition
from lifecycle.machine import ROLLOUT
from tests.analysis.conftest import Lines

FLYING = {"streaming", "partial", "aborting"}


@pytest.fixture(scope="module")
def report(run_log: Path) -> Report:
    """The report on the good run."""
    with Warehouse(find_sources([run_log])) as warehouse:
        return build_report(warehouse)


def stories(lines: Lines) -> dict[str, Lines]:
    """The lines of each rollout, in order; the log of one run in one file is in order."""
    told: dict[str, Lines] = defaultdict(list)
    for line in lines:
        if "seq" in line:
            told[line["rollout_id"]].append(line)
    return told


def state_of(line: dict[str, Any]) -> str:
    """Where the rollout stands after a line."""
    return str(line.get("dest") or line.get("state"))


def test_rollouts_are_counted_by_state_disposition_and_reason(report: Report, good_lines: Lines) -> None:
    """Each rollout is in one place: that of its last line."""
    expected: Counter[tuple[str, str, str | None]] = Counter()
    tokens: Counter[tuple[str, str, str | None]] = Counter()
    for story in stories(good_lines).values():
        said = [line["disposition"] for line in story if line["event"] == "rollout.disposition"]
        moved = [
            line for line in story if line["event"] == "rollout.transition" and line["source"] != line["dest"]
        ]
        end = (state_of(story[-1]), said[-1] if said else "none", moved[-1]["reason"] if moved else None)
        expected[end] += 1
        tokens[end] += story[-1]["tokens"]
    found = {(row["state"], row["disposition"], row["reason"]): row for row in report["rollouts"]["ends"]}
    assert {end: row["rollouts"] for end, row in found.items()} == expected
    assert {end: row["tokens"] for end, row in found.items()} == tokens
    assert report["rollouts"]["total"] == expected.total()


def test_transitions_have_counts_and_the_median_time_before(report: Report, good_lines: Lines) -> None:
    """Counts are exact, the median is that of the logged times, and what was never made is listed with zero."""
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for line in good_lines:
        if line["event"] == "rollout.transition":
            times[line["source"], line["trigger"], line["dest"]].append(line["dwell_s"])
    made = {
        (row["source"], row["trigger"], row["dest"]): row for row in report["transitions"] if row["count"]
    }
    assert {arc: row["count"] for arc, row in made.items()} == {
        arc: len(found) for arc, found in times.items()
    }
    for arc, row in made.items():
        assert row["p50_s"] == pytest.approx(median(times[arc]), rel=1e-4, abs=1e-6)
        assert row["p50_s"] <= row["p95_s"] <= row["p99_s"] <= row["max_s"]
    declared = {(arc.source, arc.trigger, arc.dest) for arc in ROLLOUT.arcs if arc.kind != "more"}
    assert {(row["source"], row["trigger"], row["dest"]) for row in report["transitions"]} == declared


def test_every_token_is_in_one_place(report: Report, good_lines: Lines) -> None:
    """Observed is what was delivered, is held, or was wasted; dropped tokens are counted by reason."""
    tokens = report["tokens"]
    places = ("delivered", "carried", "undelivered", "in_flight", "wasted")
    assert tokens["observed"] + tokens["brought"] == sum(tokens[place] for place in places)
    assert tokens["wasted"] == sum(tokens["wasted_by_reason"].values())
    last = {name: story[-1] for name, story in stories(good_lines).items()}
    dropped = sum(line.get("dropped_tokens", 0) for line in good_lines)
    assert tokens["observed"] == sum(line["tokens"] for line in last.values()) + dropped
    crashed = sum(line["dropped_tokens"] for line in good_lines if line["event"] == "rollout.restored")
    assert tokens["wasted_by_reason"]["dropped: crash"] == crashed > 0
    kept = sum(line["tokens"] for line in good_lines if line.get("trigger") == "restore")
    assert tokens["kept_by_resuming"] == kept > 0
    assert tokens["restart_would_have_wasted"] == kept + tokens["wasted"]


def test_tokens_lost_with_a_crash_are_found_even_if_nobody_logged_them(
    good_lines: Lines, write: Callable[..., Path]
) -> None:
    """A store that knew less than the log: the difference is wasted by the crash."""
    lines: Lines = json.loads(json.dumps(good_lines))
    silenced = 0
    for line in lines:
        if line["event"] == "rollout.restored":
            silenced += line["dropped_tokens"]
            line["dropped_tokens"] = 0
    with Warehouse(find_sources([write(lines)])) as warehouse:
        found = build_report(warehouse)["tokens"]["wasted_by_reason"]
    assert found["dropped: crash"] == silenced


def test_tokens_brought_from_before_the_logs_are_not_observed_here(
    good_lines: Lines, write: Callable[..., Path]
) -> None:
    """Reading only the later processes of a run, what snapshots brought along counts apart."""
    starts = [index for index, line in enumerate(good_lines) if line["event"] == "engine.started"]
    later = good_lines[starts[2] :]
    firsts = {name: story[0] for name, story in stories(later).items()}
    brought = sum(line["tokens"] for line in firsts.values() if line["event"] == "rollout.restored")
    with Warehouse(find_sources([write(later)])) as warehouse:
        assert build_report(warehouse)["tokens"]["brought"] == brought > 0


def test_abort_outcomes_and_strategies_agree(report: Report, good_lines: Lines) -> None:
    """Outcomes are those of the lines, and the strategies share them out by request id."""
    said = Counter(line["outcome"] for line in good_lines if line.get("outcome") and "trigger" in line)
    outcomes = {row["outcome"]: row["count"] for row in report["aborts"]["outcomes"]}
    assert {name: n for name, n in outcomes.items() if name != "never_sent"} == said
    by_strategy: Counter[str] = Counter()
    for row in report["aborts"]["strategies"]:
        assert row["aborts"] == sum(row["outcomes"].values())
        by_strategy.update(row["outcomes"])
    assert +by_strategy == said
    calls = Counter(line["strategy"] for line in good_lines if line["event"] == "abort.sent")
    assert {row["strategy"]: row["answers"] for row in report["aborts"]["strategies"]} == calls


def test_attempts_versions_and_lags_are_those_of_the_rollouts(report: Report, good_lines: Lines) -> None:
    """Distributions over rollouts add up to the rollouts."""
    told = stories(good_lines)
    attempts = Counter(max(line["attempt"] for line in story) for story in told.values())
    assert {row["attempts"]: row["rollouts"] for row in report["attempts"]} == attempts
    versions = Counter(
        max(line["versions"] for line in story if line["event"] == "rollout.rest")
        for story in told.values()
        if any(line["event"] == "rollout.rest" for line in story)
    )
    assert {
        row["versions"]: row["rollouts"] for row in report["staleness"]["versions_per_rollout"]
    } == versions
    lags = Counter(
        line["lag"]
        for line in good_lines
        if line["event"] == "rollout.disposition"
        and line["disposition"] == "delivered"
        and line["lag"] is not None
    )
    assert {row["lag"]: row["rollouts"] for row in report["staleness"]["lag_at_delivery"]} == lags


def test_what_no_line_knows_is_not_counted(good_lines: Lines, write: Callable[..., Path]) -> None:
    """A value that is null is none: neither the lowest value nor the highest."""
    unknown = dict.fromkeys(("lag", "worker", "straggler_s", "duration_s"))
    path = write([{**line, **{key: None for key in unknown if key in line}} for line in good_lines])
    with Warehouse(find_sources([path])) as warehouse:
        report = build_report(warehouse)
    assert report["staleness"]["lag_at_delivery"] == []
    assert {row["workers"] for row in report["aborts"]["strategies"]} == {0}
    assert [row["worker"] for row in report["workers"]["workers"]] == [None]
    settled = next(row for row in report["groups"] if row["event"] == "group.settled")
    assert settled["straggler_share"] is None
    assert set(settled["straggler"].values()) == {None}
    assert report["distributions"]["rollout_duration_s"] == []


def test_workers_are_told_apart(report: Report, good_lines: Lines) -> None:
    """Ends are counted at the worker of the line, and the slow worker of the run shows."""
    ends = Counter(
        line["worker"] for line in good_lines if line.get("source") in FLYING and line["dest"] not in FLYING
    )
    workers = {row["worker"]: row for row in report["workers"]["workers"]}
    assert {name: row["attempts"] for name, row in workers.items()} == ends
    slowest = min(workers.values(), key=lambda row: row["tokens_per_s"])
    assert slowest["worker"] == "http://10.0.0.6:30000"
    assert slowest["first_token"]["p50_s"] == max(row["first_token"]["p50_s"] for row in workers.values())


def test_words_that_a_later_process_declares_are_known(good_lines: Lines, write: Callable[..., Path]) -> None:
    """A newer version goes on with the log: its table stands far behind the beginning, and its moves are legal."""
    lines = json.loads(json.dumps(good_lines))
    at = max(number for number, line in enumerate(lines) if line["event"] == "engine.started")
    assert at > PEEKED
    newer = lines[at]["tables"]["rollout"]
    arcs = [arc | {"trigger": "land"} for arc in newer["arcs"] if arc["trigger"] == "finish"]
    newer["triggers"], newer["arcs"], newer["hash"] = (
        [*newer["triggers"], "land"],
        newer["arcs"] + arcs,
        "newer",
    )
    later = [line for line in lines[at:] if line.get("trigger") == "finish"]
    for line in later:
        line["trigger"] = "land"
    with Warehouse(find_sources([write(lines)]), strict=True) as warehouse:
        assert find_violations(warehouse) == []
        report = build_report(warehouse)
    landed = [row for row in report["transitions"] if row["trigger"] == "land"]
    assert sum(row["count"] for row in landed) == len(later) > 0
    assert {row["kind"] for row in landed} == {"move"}
    ends = Counter(
        line["worker"] for line in lines if line.get("source") in FLYING and line["dest"] not in FLYING
    )
    assert {row["worker"]: row["attempts"] for row in report["workers"]["workers"]} == ends


def test_a_straggler_is_as_exact_as_the_log(good_lines: Lines, write: Callable[..., Path]) -> None:
    """Also a very small one and a very large one."""
    for waited in (0.00004, 0.123456, 500_000.0):
        lines = [
            line | {"straggler_s": waited} if line["event"] == "group.settled" else line
            for line in good_lines
        ]
        with Warehouse(find_sources([write(lines)])) as warehouse:
            rows = build_report(warehouse)["groups"]
        found = next(row for row in rows if row["event"] == "group.settled")["straggler"]
        assert set(found.values()) == {waited}


def test_variants_are_the_sequences_of_states(report: Report, good_lines: Lines) -> None:
    """Short rollouts and long ones over several processes are told the same way."""
    expected: Counter[tuple[str, ...]] = Counter()
    for story in stories(good_lines).values():
        path: list[str] = []
        before = None
        for line in story:
            if (line["event"] == "rollout.transition" and line["source"] != line["dest"]) or (
                line["event"] == "rollout.restored" and line["state"] != before
            ):
                path.append(state_of(line))
            before = state_of(line)
        expected[tuple(path)] += 1
    found = {tuple(row["states"]): row["rollouts"] for row in report["variants"]["first"]}
    assert report["variants"]["different"] == len(expected)
    assert all(expected[path] == number for path, number in found.items())
    assert sum(found.values()) / expected.total() > 0.8


def test_groups_and_gate_have_their_times(report: Report, good_lines: Lines) -> None:
    """Group events are counted, and the gate's shut time is that of its states."""
    events = Counter(line["event"] for line in good_lines if line["event"].startswith("group."))
    found: Counter[str] = Counter()
    for row in report["groups"]:
        found[row["event"]] += row["count"]
    assert found == events
    settled = next(row for row in report["groups"] if row["event"] == "group.settled")
    assert 0 < settled["straggler_share"] <= 1
    gate = [
        line for line in good_lines if line["event"] == "gate.transition" and line["source"] != line["dest"]
    ]
    shut = sum(line["dwell_s"] for line in gate if line["source"] in {"pausing", "paused"})
    assert report["gate"]["shut_s"] == pytest.approx(shut, rel=1e-4)
    assert report["gate"]["updates"] == sum(line["dest"] == "pausing" for line in gate)


def test_orphans_are_rollouts_that_are_not_at_rest(good_lines: Lines, write: Callable[..., Path]) -> None:
    """A log that stops in a step has orphans, each with its last line."""
    cut = good_lines[:150]
    last = {name: story[-1] for name, story in stories(cut).items()}
    flying = {name for name, line in last.items() if state_of(line) in {*FLYING, "pending"}}
    path = write(cut)
    with Warehouse(find_sources([path])) as warehouse:
        orphans = build_report(warehouse)["orphans"]
    assert orphans["count"] == len(flying) > 0
    assert orphans["in_closed_logs"] == 0
    for shown in orphans["first"]:
        line = json.loads(path.read_text().splitlines()[shown["line"] - 1])
        assert line["rollout_id"] == shown["rollout_id"] in flying


def test_the_series_ends_with_nothing_in_flight(report: Report) -> None:
    """What crashed processes had in flight does not stay in the curve for ever."""
    series = report["series"]
    assert series[-1]["in_flight"] == 0
    assert max(point["in_flight"] for point in series) > 10
    assert any(point["cut_off"] for point in series)
    width = series[1]["ts"] - series[0]["ts"]
    generated = sum(point["tokens_per_s"] for point in series) * width
    assert generated == pytest.approx(report["tokens"]["observed"], rel=0.25)


def test_big_logs_are_sampled_for_speeds_and_nothing_else(
    run_log: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above a size, times per worker come from every eighth rollout, and the report says so."""
    monkeypatch.setattr("lifecycle.analysis.report.SAMPLE_ABOVE", 100)
    with Warehouse(find_sources([run_log])) as warehouse:
        sampled = build_report(warehouse)
    assert sampled["workers"]["speeds_from_every"] == 8
    for section in ("rollouts", "transitions", "tokens", "aborts", "groups", "variants"):
        assert sampled[section] == report[section]
    mean = [sum(point["tokens_per_s"] for point in each["series"]) for each in (report, sampled)]
    assert mean[1] == pytest.approx(mean[0], rel=0.5)


def test_little_memory_is_enough(run_log: Path, report: Report) -> None:
    """With a tight bound the database goes to disk and says the same."""
    with Warehouse(find_sources([run_log]), memory="120MB") as warehouse:
        assert build_report(warehouse)["tokens"] == report["tokens"]


def test_too_little_memory_is_said(run_log: Path) -> None:
    """A bound that cannot do is an error with advice, as is one that is no size."""
    with pytest.raises(ConfigurationError, match="give more with --memory"):
        Warehouse(find_sources([run_log]), memory="20MB")
    with pytest.raises(ConfigurationError, match="not a size"):
        Warehouse(find_sources([run_log]), memory="much")


def test_the_report_prints_on_any_width(report: Report) -> None:
    """The terminal form has the tables people ask for, wide and narrow."""
    for width in (80, 160):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
        print_report(report, console)
        text = console.export_text()
        console.file.close()
        for title in ("Rollouts", "Tokens", "Transitions", "Aborts", "Workers", "Groups", "Variants"):
            assert title in text
        assert "kept by" in text


def test_the_generator_writes_what_the_reader_reads(tmp_path: Path) -> None:
    """Every generated line is a record, deterministic by seed, and every move is one of the table."""
    write_log(tmp_path / "a.jsonl", 1500, seed=5, groups_per_step=4, crash_every=3)
    write_log(tmp_path / "b.jsonl", 1500, seed=5, groups_per_step=4, crash_every=3)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    records = list(read_log(tmp_path / "a.jsonl"))
    assert len(records) >= 1500
    assert all(isinstance(entry, LogLine) for entry in records)
    moves = [
        entry.record for entry in records if isinstance(getattr(entry, "record", None), RolloutTransition)
    ]
    table = {(arc.source, arc.trigger): arc.dest for arc in ROLLOUT.arcs}
    assert all(table[move.source, move.trigger] == move.dest for move in moves)
    assert any(isinstance(getattr(entry, "record", None), RolloutRestored) for entry in records)
    assert all(
        entry.record.seq >= 1
        for entry in records
        if isinstance(getattr(entry, "record", None), RolloutRecord)
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (1.23e-05, "12.3 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (90, "1.5 min"),
        (999.9, "16.7 min"),
        (5000, "1.39 h"),
        (200000, "2.31 d"),
        (0.9996, "1000 ms"),
    ],
)
def test_times_are_short(value: float | None, text: str) -> None:
    """Three digits and a unit."""
    assert seconds(value) == text


def test_rounds_of_a_path_are_folded() -> None:
    """A rollout that was resumed five times reads as one round."""
    round_ = ["pending", "streaming", "partial", "aborted"]
    assert path_of([*round_, *round_, "pending", "streaming", "failed"]) == (
        "(pending → streaming → partial → aborted) 2x → pending → streaming → failed"
    )
    assert path_of(["streaming", "completed"]) == "pending → streaming → completed"


def test_a_share_never_rounds_something_to_nothing() -> None:
    """One in a million is less than a tenth of a per cent, and not zero."""
    assert share(1, 1_000_000) == "<0.1%"
    assert share(0, 5) == "0.0%"
    assert share(None, 5) == "-"
    assert share(1, 0) == "-"


@pytest.mark.parametrize(
    ("ts", "text"),
    [
        (None, "-"),
        (1_764_400_000.0, "2025-11-29 07:06:40 UTC"),
        (253_402_300_799.0, "9999-12-31 23:59:59 UTC"),
        (253_402_300_800.0, "2.53402e+11"),
        (-1.0, "-1"),
    ],
)
def test_a_moment_that_no_calendar_knows_is_a_number(ts: float | None, text: str) -> None:
    """Whatever a log says is a time can be shown."""
    assert clock(ts) == text
