"""What happened, as plain data: one section per question. `docs/logs.md` documents every key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lifecycle.analysis import sections as of
from lifecycle.analysis.conformance import Violation
from lifecycle.analysis.machines import MachineSet
from lifecycle.analysis.sections import short
from lifecycle.analysis.warehouse import Warehouse

REPORT_SCHEMA: Final = 1
BUCKETS: Final = 120
SAMPLE_ABOVE: Final = 1_500_000
SAMPLE: Final = 8
SHOWN_VARIANTS: Final = 25
SHOWN_ORPHANS: Final = 25
DISTRIBUTIONS: Final = {
    "first_token_s": "event = 'rollout.transition' AND source = 'streaming' AND dest = 'partial'",
    "abort_latency_s": "event = 'rollout.transition' AND source = 'aborting' AND dest <> 'aborting'",
    "rollout_duration_s": "event = 'rollout.rest' AND dest IN ('completed', 'failed', 'discarded')",
}


@dataclass(slots=True)
class Report:
    """The sections as plain data, and the machines that the logs were made under."""

    sections: dict[str, Any]
    machines: list[MachineSet]
    violations: Sequence[Violation] | None = None

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        found = self.violations
        strict = None
        if found is not None:
            strict = {"violations": len(found), "first": [violation.as_dict() for violation in found[:1000]]}
        return {"schema": REPORT_SCHEMA, **self.sections, "conformance": strict}

    @property
    def tables(self) -> list[Mapping[str, Any]]:
        """Both tables as `engine.started` carries them, one entry per different pair, the newest last."""
        return [each.tables for each in self.machines]

    def __getitem__(self, section: str) -> Any:
        return self.sections[section]


def build_report(warehouse: Warehouse, violations: Sequence[Violation] | None = None) -> Report:
    """Ask the warehouse everything."""
    for table in ("rollouts", "paths", "fates"):
        warehouse.run(table)
    sample = SAMPLE if warehouse.total > SAMPLE_ABOVE else 1
    warehouse.run("flights", sample=str(sample))
    sections: dict[str, Any] = {"source": _source(warehouse), "damage": _damage(warehouse)}
    for name, build in SECTIONS.items():
        sections[name] = build(warehouse)
    sections["workers"] = of.workers(warehouse, sample)
    sections["series"] = _series(warehouse, sample)
    return Report(sections, warehouse.machines, violations)


def _source(warehouse: Warehouse) -> dict[str, Any]:
    processes = warehouse.processes
    began, ended = warehouse.span if processes else (None, None)
    return {
        "files": [str(source) for source in warehouse.sources],
        "lines": warehouse.total,
        "began": began,
        "ended": ended,
        "seconds": None if began is None or ended is None else round(ended - began, 6),
        "runs": len({process.run for process in processes}),
        "tables": [{"rollout": each.rollout.hash, "gate": each.gate.hash} for each in warehouse.machines],
        "processes": [
            {
                "process_id": process.name,
                "run_id": process.run,
                "began": process.began,
                "ended": process.ended,
                "lines": process.lines,
                "closed": process.closed,
                "table_in_log": process.machines.known,
            }
            for process in processes
        ],
    }


def _damage(warehouse: Warehouse) -> dict[str, Any]:
    damage = warehouse.damage
    return {
        "lines": damage.count,
        "first": [
            {"file": line.place.file, "line": line.place.line, "problem": line.problem}
            for line in damage.first
        ],
        "unknown_events": dict(damage.unknown_events),
        "truncated_files": damage.truncated_files,
    }


def _attempts(warehouse: Warehouse) -> list[dict[str, Any]]:
    return warehouse.rows("attempts")


def _variants(warehouse: Warehouse) -> dict[str, Any]:
    rows = warehouse.rows("variants")
    total = sum(row["rollouts"] for row in rows)
    names = state_letters(warehouse)
    return {
        "different": len(rows),
        "first": [
            {
                "states": [names[letter] for letter in reversed(row["path"] or "")],
                "rollouts": row["rollouts"],
                "share": round(row["rollouts"] / total, 6),
                "p50_s": short(row["p50"]),
                "tokens": row["tokens"],
            }
            for row in rows[:SHOWN_VARIANTS]
        ],
    }


def state_letters(warehouse: Warehouse) -> dict[str, str]:
    """Which hexadecimal digit of a path stands for which state."""
    row = warehouse.connection.execute("SELECT enum_range(NULL::state_name)::VARCHAR[]").fetchone()
    states = list(row[0]) if row else []
    return {f"{min(code, 14) + 1:x}": state for code, state in reversed(list(enumerate(states)))}


def _orphans(warehouse: Warehouse) -> dict[str, Any]:
    rows = warehouse.rows("orphans")
    shown = rows[:SHOWN_ORPHANS]
    lines = warehouse.lines(row["last_row"] for row in shown)
    last = max((process.ended for process in warehouse.processes), default=0.0)
    listed = []
    for row in shown:
        place, line = lines[row["last_row"]]
        listed.append(
            {
                "rollout_id": line["rollout_id"],
                "process_id": line["process_id"],
                "state": row["state"],
                "tokens": line["tokens"],
                "silent_s": round(last - row["ts"], 6),
                "log_closed": row["closed"],
                "file": place.file,
                "line": place.line,
            }
        )
    closed = sum(1 for row in rows if row["closed"])
    return {"count": len(rows), "in_closed_logs": closed, "first": listed}


def _anomalies(warehouse: Warehouse) -> list[dict[str, Any]]:
    rows = warehouse.rows("anomalies")
    lines = warehouse.lines(row["first_row"] for row in rows)
    return [
        {
            "kind": row["kind"],
            "count": row["n"],
            "example": lines[row["first_row"]][1].get("detail"),
            "file": lines[row["first_row"]][0].file,
            "line": lines[row["first_row"]][0].line,
        }
        for row in rows
    ]


def _distributions(warehouse: Warehouse) -> dict[str, Any]:
    """Counts per tenth of a decade: `from_s` is the lower edge, each step is 10 ** 0.1 wide."""
    found: dict[str, Any] = {}
    for name, which in DISTRIBUTIONS.items():
        rows = warehouse.rows("distribution", which=which)
        found[name] = [
            {"from_s": float(f"{10 ** (row['tenth'] / 10):.4g}"), "count": row["n"]} for row in rows
        ]
    return found


def _series(warehouse: Warehouse, sample: int) -> list[dict[str, Any]]:
    in_flight = 0
    points = []
    began, ended = warehouse.span
    parts = {"began": repr(began), "width": repr(max(ended - began, 1e-6) / BUCKETS)}
    for row in warehouse.rows("series", buckets=str(BUCKETS), sample=str(sample), **parts):
        in_flight += row["dispatched"] - row["ended"] - row["cut_off"]
        points.append(
            {
                "ts": row["ts"],
                "dispatched": row["dispatched"],
                "ended": row["ended"],
                "cut_off": row["cut_off"],
                "in_flight": max(0, in_flight),
                "tokens_per_s": short(row["tokens_per_s"]),
            }
        )
    return points


SECTIONS: Final[dict[str, Callable[[Warehouse], Any]]] = {
    "rollouts": of.rollouts,
    "transitions": of.transitions,
    "first_token": of.first_token,
    "aborts": of.aborts,
    "tokens": of.tokens,
    "attempts": _attempts,
    "staleness": of.staleness,
    "groups": of.groups,
    "gate": of.gate,
    "variants": _variants,
    "orphans": _orphans,
    "anomalies": _anomalies,
    "distributions": _distributions,
}
