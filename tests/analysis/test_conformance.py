from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lifecycle.analysis import VIOLATION_KINDS, Violation, Warehouse, find_sources, find_violations
from tests.analysis.conftest import Lines
from tests.analysis.faults import FAULTS


def check(*paths: Path) -> list[Violation]:
    """Everything that `--strict` finds in these files."""
    with Warehouse(find_sources(paths), strict=True) as warehouse:
        return find_violations(warehouse)


def test_a_good_log_has_no_violations(run_log: Path, split_log: list[Path]) -> None:
    """Crashes, restarts, aborts, carries and late triggers are all allowed, in one file and in several."""
    assert check(run_log) == []
    assert check(*split_log) == []


def test_two_runs_with_the_same_ids_do_not_disturb_each_other(
    run_log: Path, good_lines: Lines, write: Callable[..., Path]
) -> None:
    """Runs that took nothing over from each other may use the same rollout ids."""
    swap = {line["process_id"]: f"again-{line['process_id']}" for line in good_lines}
    other = json.loads(json.dumps(good_lines))
    for line in other:
        line["run_id"] = "another run"
        line["process_id"] = swap[line["process_id"]]
        if line.get("from_process"):
            line["from_process"] = swap[line["from_process"]]
    assert check(run_log, write(other, "other.jsonl")) == []


@pytest.mark.parametrize(("kind", "spoil"), FAULTS, ids=[spoil.__name__ for _, spoil in FAULTS])
def test_a_seeded_fault_is_found_and_only_it(
    kind: str, spoil: Callable[[Lines], int], good_lines: Lines, write: Callable[..., Path]
) -> None:
    """One edit of a good log gives one violation of its kind, at its line, naming the rollout."""
    lines = copy.deepcopy(good_lines)
    at = spoil(lines)
    path = write(lines)
    found = check(path)
    assert [violation.kind for violation in found] == [kind], "\n".join(map(str, found))
    assert (found[0].file, found[0].line) == (str(path), at + 1)
    assert found[0].rollout_id == lines[at].get("rollout_id")
    assert found[0].process_id == lines[at]["process_id"]
    assert found[0].found
    assert found[0].expected


def test_every_kind_has_a_fault() -> None:
    """No kind of violation is without a log that shows it."""
    assert {kind for kind, _ in FAULTS} == set(VIOLATION_KINDS)


def test_the_table_of_the_log_decides_not_that_of_this_version(
    good_lines: Lines, write: Callable[..., Path]
) -> None:
    """A log whose own table allows a move that ours does not is right; the same move is wrong without it."""
    lines = copy.deepcopy(good_lines)
    for line in lines:
        if line["event"] == "engine.started":
            arcs = line["tables"]["rollout"]["arcs"]
            arcs += [
                {
                    "source": "partial",
                    "trigger": "salvage",
                    "dest": "completed",
                    "kind": "move",
                    "when": "new",
                }
            ]
            line["tables"]["rollout"]["triggers"].append("salvage")
            line["tables"]["rollout"]["hash"] = "0" * 16
    at = next(
        i for i, line in enumerate(lines) if line.get("trigger") == "finish" and line["source"] == "partial"
    )
    lines[at]["trigger"] = "salvage"
    assert check(write(lines, "new.jsonl")) == []
    only_move = [{**good_lines[i], **({"trigger": "salvage"} if i == at else {})} for i in range(len(lines))]
    assert [violation.kind for violation in check(write(only_move, "old.jsonl"))] == ["undeclared_move"]


def test_a_log_that_was_cut_off_may_end_anywhere(good_lines: Lines, write: Callable[..., Path]) -> None:
    """Without engine.stopped, rollouts in flight and unresolved aborts are no violations."""
    for end in (len(good_lines) // 3, len(good_lines) // 2, len(good_lines) - 2):
        assert check(write(good_lines[:end])) == []


def test_damaged_lines_show_as_gaps_and_not_as_broken_chains(
    good_lines: Lines, write: Callable[..., Path]
) -> None:
    """A line that cannot be read is a gap in its chain, and nothing is said about what stood in it."""
    at = next(i for i, line in enumerate(good_lines) if line.get("trigger") == "observe")
    text = [json.dumps(line) for line in good_lines]
    text[at] = text[at][:40]
    assert [violation.kind for violation in check(write(text))] == ["seq_gap"]


def test_a_log_without_engine_started_is_checked_on_our_table(
    good_lines: Lines, write: Callable[..., Path]
) -> None:
    """A rotated log that lost its first line is still replayed."""
    lines = [line for line in good_lines if line["event"] != "engine.started"]
    assert check(write(lines)) == []
    at = next(
        i for i, line in enumerate(lines) if line.get("trigger") == "finish" and line["source"] == "partial"
    )
    lines[at] = {**lines[at], "trigger": "exhaust"}
    found = check(write(lines))
    assert [(violation.kind, violation.line) for violation in found] == [("undeclared_move", at + 1)]
    assert found[0].expected.startswith("one of: observe → partial")


def test_a_violation_reads_as_one_line(good_lines: Lines, write: Callable[..., Path]) -> None:
    """The text names file, line, kind, rollout, what was found and what was expected."""
    lines = copy.deepcopy(good_lines)
    at = {spoil.__name__: spoil for _, spoil in FAULTS}["broken_chain"](lines)
    path = write(lines)
    text = str(check(path)[0])
    assert text.startswith(f"{path}:{at + 1}: broken_chain: rollout {lines[at]['rollout_id']!r}: ")
    assert "expected 'partial'" in text
