"""The sections of a report, each from the rows of a few queries: what became of rollouts, tokens, aborts and groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lifecycle.analysis.warehouse import Warehouse
from lifecycle.states import FINAL_STATES, IN_FLIGHT_STATES


def times(row: Mapping[str, Any], key: str = "q") -> dict[str, float | None]:
    """The percentiles of a row, in seconds."""
    values = row[key] or (None, None, None)
    return {name: short(value) for name, value in zip(("p50_s", "p95_s", "p99_s"), values, strict=True)}


def short(value: float | None) -> float | None:
    """Six digits: what a measured time is worth."""
    return None if value is None else float(f"{value:.6g}")


def rollouts(warehouse: Warehouse) -> dict[str, Any]:
    """Where every rollout is, and what the caller did with it."""
    ends = warehouse.once("ends")
    return {
        "total": sum(row["rollouts"] for row in ends),
        "states": _summed(ends, "state", "rollouts"),
        "dispositions": _summed(ends, "disposition", "rollouts"),
        "ends": [
            {k: row[k] for k in ("state", "disposition", "reason", "rollouts", "tokens")} for row in ends
        ],
    }


def _summed(rows: Iterable[Mapping[str, Any]], by: str, what: str) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row in rows:
        sums[row[by]] = sums.get(row[by], 0) + row[what]
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def transitions(warehouse: Warehouse) -> list[dict[str, Any]]:
    """Every move, with the time spent before it."""
    machines = warehouse.machines
    rows = warehouse.rows("transitions", event="rollout.transition")
    return _with_declared(rows, [each.rollout.arcs for each in machines])


def _with_declared(
    rows: Iterable[Mapping[str, Any]], tables: Sequence[Sequence[tuple[str, str, str, str]]]
) -> list[dict[str, Any]]:
    """The moves that were made, then the declared ones that were not; arcs that are never logged stay out."""
    kinds = {(s, t, d): kind for arcs in tables for s, t, d, kind in arcs}
    made = {(row["source"], row["trigger"], row["dest"]): row for row in rows}
    listed: list[dict[str, Any]] = []
    for (source, trigger, dest), row in made.items():
        kind = kinds.pop((source, trigger, dest), "undeclared")
        arc = {"source": source, "trigger": trigger, "dest": dest, "kind": kind}
        listed.append({**arc, "count": row["n"], **times(row), "max_s": short(row["longest"])})
    for (source, trigger, dest), kind in kinds.items():
        if kind != "more":
            arc = {"source": source, "trigger": trigger, "dest": dest, "kind": kind}
            listed.append({**arc, "count": 0, "p50_s": None, "p95_s": None, "p99_s": None, "max_s": None})
    return listed


def first_token(warehouse: Warehouse) -> dict[str, Any]:
    """How long attempts waited for their first token."""
    row = warehouse.row("first_token")
    return {"attempts": row["n"], **times(row), "max_s": short(row["longest"])}


def aborts(warehouse: Warehouse) -> dict[str, Any]:
    """How aborts ended, what came too late, and what each strategy cost."""
    strategies = {row["strategy"]: row for row in warehouse.rows("abort_strategies")}
    outcomes = [
        {
            "outcome": row["outcome"],
            "count": row["n"],
            **times(row),
            "max_s": short(row["longest"]),
            "tokens": row["tokens"],
        }
        for row in warehouse.rows("abort_outcomes")
    ]
    counted = ("confirmed", "finished", "lost", "expired", "rejected")
    return {
        "outcomes": outcomes,
        "late": warehouse.rows("late_triggers"),
        "strategies": [
            {
                "strategy": row["strategy"],
                "answers": row["answers"],
                "requests": row["requests"],
                "workers": row["workers"],
                "accepted": row["accepted"],
                "refused": row["refused"],
                "unreachable": row["unreachable"],
                "rounds": row["rounds"],
                "call": times(row),
                "aborts": strategies.get(row["strategy"], {}).get("n", 0),
                "latency": times(strategies.get(row["strategy"], {"q": None})),
                "outcomes": {name: strategies.get(row["strategy"], {}).get(name, 0) for name in counted},
            }
            for row in warehouse.rows("abort_calls")
        ],
    }


def tokens(warehouse: Warehouse) -> dict[str, Any]:
    """Where every token is: delivered, held, or wasted for a reason."""
    ends, drops = warehouse.once("ends"), warehouse.rows("dropped")
    places: dict[str, int] = {}
    wasted: dict[str, int] = {}
    for row in ends:
        place, why = _place(row["state"], row["disposition"], row["reason"])
        if why is not None:
            wasted[why] = wasted.get(why, 0) + row["tokens"]
        else:
            places[place] = places.get(place, 0) + row["tokens"]
    for row in drops:
        wasted[f"dropped: {row['reason']}"] = row["dropped"]
    lost = sum(row["lost_unseen"] for row in ends)
    if lost:
        wasted["dropped: crash"] = wasted.get("dropped: crash", 0) + lost
    wasted = {why: n for why, n in sorted(wasted.items(), key=lambda item: -item[1]) if n}
    brought = sum(row["brought"] for row in ends)
    kept = sum(row["kept"] for row in drops)
    return {
        "observed": sum(places.values()) + sum(wasted.values()) - brought,
        "brought": brought,
        "delivered": places.get("delivered", 0),
        "carried": places.get("resumable", 0),
        "undelivered": places.get("completed", 0),
        "in_flight": places.get("in_flight", 0) + places.get("pending", 0),
        "wasted": sum(wasted.values()),
        "wasted_by_reason": wasted,
        "kept_by_resuming": kept,
        "resumes": sum(row["resumes"] for row in drops),
        "restart_would_have_wasted": sum(wasted.values()) + kept,
    }


def _place(state: str, disposition: str, reason: str | None) -> tuple[str, str | None]:
    """Where the tokens of a rollout are, as in the engine's ledger, and why they are wasted if they are."""
    if state == "completed":
        if disposition in {"filtered", "stale"}:
            return disposition, disposition
        return ("delivered" if disposition == "delivered" else "completed"), None
    if state in FINAL_STATES:
        return state, f"{state}: {reason or 'unknown'}"
    if state in IN_FLIGHT_STATES:
        return "in_flight", None
    return ("pending" if state == "pending" else "resumable"), None


def staleness(warehouse: Warehouse) -> dict[str, Any]:
    """Over how many weight versions rollouts spread, and how far behind they were when delivered."""
    return {"versions_per_rollout": warehouse.rows("versions"), "lag_at_delivery": warehouse.rows("lags")}


def groups(warehouse: Warehouse) -> list[dict[str, Any]]:
    """What became of groups, and how long they waited for their slowest member."""
    return [
        {
            "event": row["event"],
            "reason": row["reason"],
            "count": row["n"],
            "tokens": row["tokens"],
            **times(row),
            "max_s": short(row["longest"]),
            "straggler": times(row, "straggler_q") if row["event"] == "group.settled" else None,
            "straggler_share": short(row["straggler_share"]),
        }
        for row in warehouse.rows("groups")
    ]


def gate(warehouse: Warehouse) -> dict[str, Any]:
    """How long dispatching was shut, and what that interrupted."""
    states = warehouse.rows("gate_states")
    cost = warehouse.row("gate_cost")
    total = sum(row["seconds"] for row in states)
    shut = sum(row["seconds"] for row in states if row["state"] in {"pausing", "paused"})
    tables = [each.gate.arcs for each in warehouse.machines]
    return {
        "updates": cost["updates"],
        "modes": sorted(cost["modes"] or []),
        "interrupted": cost["interrupted"],
        "interrupted_tokens": cost["interrupted_tokens"],
        "shut_s": round(shut, 6),
        "shut_share": round(shut / total, 6) if total else None,
        "states": [
            {"state": row["state"], "count": row["n"], "seconds": round(row["seconds"], 6), **times(row)}
            for row in states
        ],
        "transitions": _with_declared(warehouse.rows("transitions", event="gate.transition"), tables),
    }


def workers(warehouse: Warehouse, sample: int) -> dict[str, Any]:
    """How attempts ended at each worker, and how fast it was; times from every `sample`th rollout."""
    ends = warehouse.rows("worker_ends")
    speed = {row["worker"]: row for row in warehouse.rows("worker_speed")}
    named = warehouse.lines(row["first_row"] for row in ends if row["worker"] is not None)
    counted = ("attempts", "finished", "aborted", "preempted", "lost", "rejected", "expired")
    nothing = {"sampled": 0, "first_token": None, "tokens_per_s": None}
    listed = []
    for row in ends:
        fast = speed.get(row["worker"], nothing)
        listed.append(
            {
                "worker": named[row["first_row"]][1]["worker"] if row["worker"] is not None else None,
                **{name: row[name] for name in counted},
                "first_token": times(fast, "first_token"),
                "tokens_per_s": short(fast["tokens_per_s"]),
            }
        )
    return {"speeds_from_every": sample, "workers": sorted(listed, key=lambda each: str(each["worker"]))}
