"""What the machine forbids and happened all the same: every rollout replayed on the table that the log carries.

A kind is found by one query. Each violation names file, line and rollout, what was there and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from lifecycle.analysis.machines import LoggedMachine
from lifecycle.analysis.warehouse import Line, Place, Process, Warehouse

VIOLATION_KINDS: Final[dict[str, str]] = {
    "undeclared_move": "a move that the table in the log does not declare",
    "broken_chain": "a line that does not begin where the line before it ended",
    "seq_gap": "lines of a rollout are missing, doubled or out of order",
    "after_final": "something moved after a final state",
    "two_live_attempts": "a second attempt while one was in flight",
    "tokens_fell": "tokens went away where nothing may take them",
    "tokens_mismatch": "token counts that do not add up",
    "no_end": "the log was closed, and the rollout is not at rest",
    "abort_unresolved": "the log was closed, and an abort has no outcome",
    "delivered_twice": "handed to the caller more than once",
    "dispatch_gate_closed": "a request was sent while the gate was not open",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that should not have happened. `line` counts from 1; `rollout_id` is None for the gate."""

    kind: str
    file: str
    line: int
    rollout_id: str | None
    process_id: str
    found: str
    expected: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        who = f"rollout {self.rollout_id!r}" if self.rollout_id else f"process {self.process_id!r}"
        return f"{self.file}:{self.line}: {self.kind}: {who}: {self.found}; expected {self.expected}"


Row = Mapping[str, Any]


def find_violations(warehouse: Warehouse) -> list[Violation]:
    """Run every check over a warehouse that was opened with `strict=True`; in the order of the lines."""
    _declare_arcs(warehouse)
    checker = _Checker(warehouse)
    found = [
        (row["row_number"], row)
        for query in (
            "check_chains",
            "check_gate",
            "check_ends",
            "check_handovers",
            "check_doubles",
            "check_closed_gate",
        )
        for row in warehouse.rows(query)
    ]
    told = {row for row, _ in found}
    foreign = [row for row in warehouse.damage.foreign_words if row not in told]
    found += [(row, {"row_number": row, "kind": "undeclared_move"}) for row in foreign]
    lines = warehouse.lines(
        {row for row, _ in found} | {r["before_row"] for _, r in found if r.get("before_row") is not None}
    )
    return [checker.violation(row, lines) for _, row in sorted(found, key=lambda item: item[0])]


def _declare_arcs(warehouse: Warehouse) -> None:
    warehouse.connection.execute(
        "CREATE OR REPLACE TABLE arcs (process UINTEGER, source VARCHAR, trigger VARCHAR, dest VARCHAR)"
    )
    warehouse.connection.execute(
        "CREATE OR REPLACE TABLE rules (process UINTEGER, initial VARCHAR, finals VARCHAR[])"
    )
    for process in warehouse.processes:
        rollout, gate = process.machines.rollout, process.machines.gate
        warehouse.connection.execute(
            "INSERT INTO rules VALUES (?, ?, ?)", [process.key, rollout.initial, sorted(rollout.finals)]
        )
        arcs = [[source, trigger, dest] for source, trigger, dest, _ in (*rollout.arcs, *gate.arcs)]
        warehouse.connection.execute(
            "INSERT INTO arcs SELECT $1, arc[1], arc[2], arc[3] FROM (SELECT unnest($2::VARCHAR[][]) AS arc)",
            [process.key, arcs],
        )
    warehouse.run("legal")


class _Checker:
    """Turns the row of a check into a violation with words."""

    def __init__(self, warehouse: Warehouse) -> None:
        self._processes: dict[str, Process] = {process.name: process for process in warehouse.processes}

    def violation(self, row: Row, lines: Mapping[int, tuple[Place, Line]]) -> Violation:
        place, line = lines[row["row_number"]]
        found, expected = _WORDS[row["kind"]](self, row, line)
        before = row.get("before_row")
        if before is not None:
            found += f" (before it: line {lines[before][0].line} of {lines[before][0].file})"
        return Violation(
            row["kind"],
            place.file,
            place.line,
            line.get("rollout_id"),
            str(line["process_id"]),
            found,
            expected,
        )

    def machine(self, line: Line) -> LoggedMachine:
        machines = self._processes[line["process_id"]].machines
        return machines.gate if line["event"] == "gate.transition" else machines.rollout

    def undeclared_move(self, _: Row, line: Line) -> tuple[str, str]:
        source, trigger, dest = line.get("source"), line.get("trigger"), line.get("dest", line.get("state"))
        machine = self.machine(line)
        declared = machine.dest(str(source), str(trigger))
        legal = ", ".join(machine.legal(str(source))) or "a declared state"
        return f"{source} —{trigger}→ {dest}", f"{trigger} → {declared}" if declared else f"one of: {legal}"

    def broken_chain(self, row: Row, line: Line) -> tuple[str, str]:
        at = line.get("source") or line.get("state")
        found = f"{line['event']} #{line.get('seq', '-')} says {at!r}"
        if row["state_before"] is None:
            return found, f"a first line in {self.machine(line).initial!r}, or rollout.restored"
        return found, repr(row["state_before"])

    def seq_gap(self, row: Row, line: Line) -> tuple[str, str]:
        return f"seq {line['seq']}", f"seq {(row['seq_before'] or 0) + 1}"

    def after_final(self, row: Row, line: Line) -> tuple[str, str]:
        if line["event"] == "rollout.transition":
            found = f"{line['source']} —{line['trigger']}→ {line['dest']}"
        else:
            found = f"{line['event']} in {line.get('state')!r}"
        return f"{found} after {row['state_before']!r}", "no move after a final state"

    def two_live_attempts(self, row: Row, line: Line) -> tuple[str, str]:
        found = f"attempt {line['attempt']} ({line.get('trigger') or line['event']}, rid {line['rid']})"
        if row.get("other_process"):
            return (
                f"{found} while another process had sent the rollout too",
                "one live attempt over all processes",
            )
        return (
            f"{found} while the rollout was {row['state_before']!r}",
            f"attempt {row['attempt_before']} to end first",
        )

    def tokens_fell(self, row: Row, line: Line) -> tuple[str, str]:
        found = f"{row['tokens_before']} tokens became {line['tokens']}"
        dropped = line.get("dropped_tokens") or 0
        if dropped:
            found += f", {dropped} dropped by {line.get('trigger') or line['event']}"
        return found, "tokens to fall only by dropped_tokens of restore or rollout.restored"

    def tokens_mismatch(self, row: Row, line: Line) -> tuple[str, str]:
        if line["event"].startswith("group."):
            return (
                f"{line['tokens']} tokens in the group",
                f"{row['tokens_before']}, the sum over its members",
            )
        if row.get("tokens_before") is None or row["tokens_expected"] is None:
            return (
                f"spans {line.get('spans')} over {line['tokens']} tokens",
                "spans in order and within the tokens",
            )
        least = "at least " if row["tokens_may_grow"] else ""
        return (
            f"{line['tokens']} tokens (new {line.get('new_tokens', 0)})",
            f"{least}{row['tokens_expected']}",
        )

    def no_end(self, row: Row, _: Line) -> tuple[str, str]:
        return (
            f"last seen {row['state_before']!r}, then engine.stopped",
            "a rest: aborted, completed, failed or discarded",
        )

    def abort_unresolved(self, _row: Row, _line: Line) -> tuple[str, str]:
        return "last seen 'aborting', then engine.stopped", "confirm, finish, lose, expire or reject"

    def delivered_twice(self, _: Row, line: Line) -> tuple[str, str]:
        what = f"group {line['group_id']!r}" if line["event"].startswith("group.") else "the rollout"
        return f"{what} delivered again", "one delivery over all processes"

    def dispatch_gate_closed(self, row: Row, _: Line) -> tuple[str, str]:
        return f"dispatch while the gate was {row['state_before']!r}", "the gate to be open"


_WORDS: Final[dict[str, Callable[[_Checker, Row, Line], tuple[str, str]]]] = {
    kind: getattr(_Checker, kind) for kind in VIOLATION_KINDS
}


def counted(violations: Iterable[Violation]) -> dict[str, int]:
    """How many of each kind, in the order in which the kinds are documented."""
    numbers = dict.fromkeys(VIOLATION_KINDS, 0)
    for violation in violations:
        numbers[violation.kind] += 1
    return {kind: number for kind, number in numbers.items() if number}
