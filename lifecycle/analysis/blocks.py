"""The report as titled tables: what the terminal and the page both show. Cells keep their number beside their text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lifecycle.analysis.report import Report
from lifecycle.analysis.words import count, path_of, seconds, share


@dataclass(frozen=True, slots=True)
class Cell:
    """What is shown, and what it is sorted by; a cell with a number is set to the right."""

    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """One table. `note` says how to read it; `key` is stable, for anchors."""

    key: str
    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def number(value: float | None) -> Cell:
    """A count."""
    return Cell(count(value), -1.0 if value is None else float(value))


def duration(value: float | None) -> Cell:
    """A time."""
    return Cell(seconds(value), -1.0 if value is None else float(value))


def percent(part: float | None, whole: float | None = 1.0) -> Cell:
    """A share."""
    return Cell(share(part, whole), -1.0 if part is None or not whole else part / whole)


def word(value: object) -> Cell:
    """A name; nothing is a dash."""
    return Cell("-" if value is None else str(value))


def percentiles(row: dict[str, Any] | None) -> tuple[Cell, Cell, Cell]:
    """p50, p95 and p99 of a row."""
    found = row or {}
    return duration(found.get("p50_s")), duration(found.get("p95_s")), duration(found.get("p99_s"))


TIMES = ("p50", "p95", "p99")


def blocks(report: Report) -> Iterator[Block]:
    """All tables that have rows, in the order in which people ask."""
    for build in (
        _violations,
        _ends,
        _tokens,
        _transitions,
        _outcomes,
        _strategies,
        _late,
        _attempts,
        _versions,
        _lags,
        _workers,
        _groups,
        _gate,
        _variants,
        _orphans,
        _anomalies,
        _processes,
        _damage,
    ):
        block = build(report)
        if block.rows:
            yield block


def _block(key: str, title: str, note: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Block:
    return Block(key, title, note, tuple(columns), tuple(tuple(row) for row in rows))


def _violations(report: Report) -> Block:
    rows = (
        (word(v.kind), word(f"{v.file}:{v.line}"), word(v.rollout_id), word(v.found), word(v.expected))
        for v in (report.violations or ())[:200]
    )
    note = "What the table in the log forbids and happened all the same; the first 200."
    return _block("violations", "Violations", note, ("kind", "place", "rollout", "found", "expected"), rows)


def _ends(report: Report) -> Block:
    total = report["rollouts"]["total"]
    rows = (
        (
            word(row["state"]),
            word(row["disposition"]),
            word(row["reason"]),
            number(row["rollouts"]),
            percent(row["rollouts"], total),
            number(row["tokens"]),
        )
        for row in report["rollouts"]["ends"]
    )
    note = "Where every rollout is at the end of the logs, what the caller did with it, and why it is there."
    columns = ("state", "disposition", "reason", "rollouts", "share", "tokens held")
    return _block("rollouts", "Rollouts", note, columns, rows)


def _tokens(report: Report) -> Block:
    tokens = report["tokens"]
    observed = tokens["observed"] + tokens["brought"]
    named = [
        ("observed", tokens["observed"]),
        ("brought along from before these logs", tokens["brought"]),
        ("delivered", tokens["delivered"]),
        ("carried (at rest, can be resumed)", tokens["carried"]),
        ("completed, not handed over yet", tokens["undelivered"]),
        ("in flight or pending", tokens["in_flight"]),
        ("wasted", tokens["wasted"]),
        *((f"wasted: {why}", n) for why, n in tokens["wasted_by_reason"].items()),
        (f"kept by {tokens['resumes']:,} resumes", tokens["kept_by_resuming"]),
        ("restarting from the prompt would have wasted", tokens["restart_would_have_wasted"]),
    ]
    rows = (
        (word(name), number(n), percent(n, observed))
        for name, n in named
        if n or name in {"observed", "wasted"}
    )
    note = "Every generated token is in one place: delivered, held, or wasted for a reason."
    return _block("tokens", "Tokens", note, ("tokens", "number", "share"), rows)


def _transitions(report: Report) -> Block:
    rows = (
        (
            word(row["source"]),
            word(row["trigger"]),
            word(row["dest"]),
            number(row["count"]),
            *percentiles(row),
            duration(row["max_s"]),
            word(row["kind"]),
        )
        for row in report["transitions"]
        if row["count"]
    )
    never = sum(not row["count"] for row in report["transitions"])
    note = f"Every move, and the time spent in its source before it. {never} declared moves were never made."
    columns = ("from", "trigger", "to", "count", *TIMES, "max", "kind")
    return _block("transitions", "Transitions", note, columns, rows)


def _outcomes(report: Report) -> Block:
    outcomes = report["aborts"]["outcomes"]
    total = sum(row["count"] for row in outcomes)
    rows = (
        (
            word(row["outcome"]),
            number(row["count"]),
            percent(row["count"], total),
            *percentiles(row),
            duration(row["max_s"]),
            number(row["tokens"]),
        )
        for row in outcomes
    )
    note = "How aborts ended, and the time from asking to the answer. An expired one may have left a request on a server."
    return _block("aborts", "Aborts", note, ("outcome", "count", "share", *TIMES, "max", "tokens kept"), rows)


def _strategies(report: Report) -> Block:
    rows = (
        (
            word(row["strategy"]),
            number(row["aborts"]),
            number(row["requests"]),
            number(row["workers"]),
            number(row["unreachable"] + row["refused"]),
            duration(row["call"]["p50_s"]),
            *percentiles(row["latency"]),
            number(row["outcomes"]["expired"]),
        )
        for row in report["aborts"]["strategies"]
    )
    note = "The same aborts by how they were asked for: request by request at every worker, all at once, or by closing."
    columns = ("strategy", "aborts", "requests", "workers", "failed calls", "call p50", *TIMES, "expired")
    return _block("strategies", "Abort strategies", note, columns, rows)


def _late(report: Report) -> Block:
    rows = ((word(row["state"]), word(row["trigger"]), number(row["n"])) for row in report["aborts"]["late"])
    note = "Aborts and discards that found nothing to do: declared, logged and without effect."
    return _block("late", "Too late", note, ("state", "trigger", "count"), rows)


def _attempts(report: Report) -> Block:
    total = report["rollouts"]["total"]
    rows = (
        (
            number(row["attempts"]),
            number(row["rollouts"]),
            percent(row["rollouts"], total),
            number(row["tokens"]),
        )
        for row in report["attempts"]
    )
    note = "How many requests a rollout needed, retries and resumes included."
    return _block("attempts", "Attempts", note, ("attempts", "rollouts", "share", "tokens held"), rows)


def _versions(report: Report) -> Block:
    found = report["staleness"]["versions_per_rollout"]
    total = sum(row["rollouts"] for row in found)
    rows = (
        (number(row["versions"]), number(row["rollouts"]), percent(row["rollouts"], total)) for row in found
    )
    note = "From how many weight versions the tokens of one rollout come."
    return _block("versions", "Weight versions per rollout", note, ("versions", "rollouts", "share"), rows)


def _lags(report: Report) -> Block:
    found = report["staleness"]["lag_at_delivery"]
    total = sum(row["rollouts"] for row in found)
    rows = ((number(row["lag"]), number(row["rollouts"]), percent(row["rollouts"], total)) for row in found)
    note = "How many published versions the oldest token was behind when its rollout was delivered."
    return _block("lag", "Lag at delivery", note, ("versions behind", "rollouts", "share"), rows)


def _workers(report: Report) -> Block:
    rows = (
        (
            word(row["worker"] or "(hidden by a router)"),
            number(row["attempts"]),
            number(row["finished"]),
            number(row["aborted"]),
            number(row["lost"] + row["preempted"]),
            number(row["rejected"]),
            number(row["expired"]),
            *percentiles(row["first_token"]),
            Cell(
                "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.3g}",
                row["tokens_per_s"] or -1.0,
            ),
        )
        for row in report["workers"]["workers"]
    )
    every = report["workers"]["speeds_from_every"]
    note = "How attempts ended, time to first token, and median tokens per second of one stream"
    note += f"; the times from every {every}th rollout." if every > 1 else "."
    columns = ("worker", "attempts", "finished", "aborted", "lost", "rejected", "expired", *TIMES, "tokens/s")
    return _block("workers", "Workers", note, columns, rows)


def _groups(report: Report) -> Block:
    rows = (
        (
            word(row["event"].removeprefix("group.")),
            word(row["reason"]),
            number(row["count"]),
            *percentiles(row),
            duration((row["straggler"] or {}).get("p50_s")),
            percent(row["straggler_share"]),
        )
        for row in report["groups"]
    )
    note = "Time from submit to the event; straggler: from the first member's end to the last, and its share of the time."
    return _block(
        "groups",
        "Groups",
        note,
        ("event", "reason", "count", *TIMES, "straggler p50", "straggler share"),
        rows,
    )


def _gate(report: Report) -> Block:
    gate = report["gate"]
    rows = (
        (word(row["state"]), number(row["count"]), duration(row["seconds"]), *percentiles(row))
        for row in gate["states"]
    )
    note = (
        f"{gate['updates']:,} weight updates ({', '.join(gate['modes']) or 'no mode said'}); dispatching was shut for "
        f"{seconds(gate['shut_s'])} ({share(gate['shut_share'])}); {gate['interrupted']:,} rollouts were interrupted, "
        f"which held {gate['interrupted_tokens']:,} tokens."
    )
    return _block("gate", "Gate", note, ("state", "left", "time", *TIMES), rows)


def _variants(report: Report) -> Block:
    variants = report["variants"]
    rows = (
        (
            word(path_of(row["states"])),
            number(row["rollouts"]),
            percent(row["share"]),
            duration(row["p50_s"]),
            number(row["tokens"]),
        )
        for row in variants["first"]
    )
    note = f"The sequences of states that rollouts went through: {variants['different']:,} different ones."
    return _block("variants", "Variants", note, ("states", "rollouts", "share", "p50", "tokens held"), rows)


def _orphans(report: Report) -> Block:
    orphans = report["orphans"]
    rows = (
        (
            word(row["rollout_id"]),
            word(row["state"]),
            number(row["tokens"]),
            duration(row["silent_s"]),
            word("closed" if row["log_closed"] else "ends here"),
            word(f"{row['file']}:{row['line']}"),
        )
        for row in orphans["first"]
    )
    note = (
        f"{orphans['count']:,} rollouts whose story stops in the middle, {orphans['in_closed_logs']:,} of them in logs "
        "that were closed."
    )
    return _block(
        "orphans", "Orphans", note, ("rollout", "state", "tokens", "silent for", "log", "last line"), rows
    )


def _anomalies(report: Report) -> Block:
    rows = (
        (word(row["kind"]), number(row["count"]), word(row["example"]), word(f"{row['file']}:{row['line']}"))
        for row in report["anomalies"]
    )
    note = "What was odd and changed nothing."
    return _block("anomalies", "Anomalies", note, ("kind", "count", "example", "first"), rows)


def _processes(report: Report) -> Block:
    rows = (
        (
            word(row["process_id"]),
            word(row["run_id"]),
            number(row["lines"]),
            duration(row["ended"] - row["began"]),
            word("closed" if row["closed"] else "ends without engine.stopped"),
        )
        for row in report["source"]["processes"]
    )
    note = "Who wrote these logs."
    return _block("processes", "Processes", note, ("process", "run", "lines", "time", "end"), rows)


def _damage(report: Report) -> Block:
    damage = report["damage"]
    rows = [(word(f"{row['file']}:{row['line']}"), word(row["problem"])) for row in damage["first"]]
    rows += [(word(name), word("the compressed file is cut off")) for name in damage["truncated_files"]]
    rows += [
        (word("newer event"), word(f"{name}: {count(n)} lines left out"))
        for name, n in damage["unknown_events"].items()
    ]
    note = f"{damage['lines']:,} damaged lines were left out."
    return _block("damage", "Damaged lines", note, ("place", "problem"), rows)
