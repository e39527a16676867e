"""Good logs made bad, one fault each: a function takes good lines and gives edited ones and where the fault is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

Line = dict[str, Any]
Lines = list[Line]
FINAL = {"completed", "failed", "discarded"}


def about(line: Line) -> tuple[str, str] | None:
    """The chain a line belongs to."""
    return (line["process_id"], line["rollout_id"]) if "seq" in line else None


def chain(lines: Lines, at: int) -> list[int]:
    """The places of all lines of the chain of line `at`."""
    return [index for index, line in enumerate(lines) if about(line) == about(lines[at])]


def later(lines: Lines, at: int) -> list[int]:
    """The places in the chain after `at`."""
    return [index for index in chain(lines, at) if index > at]


def closed(lines: Lines) -> set[str]:
    """The processes that ended in order."""
    return {line["process_id"] for line in lines if line["event"] == "engine.stopped"}


def processes_of(lines: Lines, rollout: str) -> set[str]:
    """Where a rollout was."""
    return {line["process_id"] for line in lines if line.get("rollout_id") == rollout and "seq" in line}


def delivered_groups(lines: Lines) -> set[str]:
    """Groups whose tokens are summed up somewhere."""
    return {line["group_id"] for line in lines if line["event"] == "group.delivered"}


def moves(lines: Lines, **wanted: Any) -> Iterator[int]:
    """The places of transitions with these values."""
    for index, line in enumerate(lines):
        if line["event"] == "rollout.transition" and all(line[key] == value for key, value in wanted.items()):
            yield index


def undeclared_move(lines: Lines) -> int:
    """A trigger that the table does not have in that state."""
    at = next(moves(lines, trigger="finish", source="partial"))
    lines[at]["trigger"] = "exhaust"
    return at


def undeclared_word(lines: Lines) -> int:
    """A trigger that nobody knows."""
    at = next(moves(lines, trigger="finish", source="partial"))
    lines[at]["trigger"] = "teleport"
    return at


def undeclared_first_move(lines: Lines) -> int:
    """A first line that the table does not declare."""
    at = next(index for index in moves(lines, trigger="dispatch") if lines[index]["seq"] == 1)
    lines[at]["trigger"] = "confirm"
    return at


def undeclared_gate_move(lines: Lines) -> int:
    """A gate that settles without having paused."""
    at = next(
        i
        for i, line in enumerate(lines)
        if line["event"] == "gate.transition" and line["trigger"] == "settle"
    )
    lines[at]["trigger"] = "close"
    return at


def broken_chain(lines: Lines) -> int:
    """A declared move, from a state in which the rollout was not."""
    at = next(moves(lines, trigger="finish", source="partial"))
    lines[at]["source"] = "streaming"
    return at


def broken_rest(lines: Lines) -> int:
    """A rest in another state than the move before it led to."""
    at = next(i for i, line in enumerate(lines) if line["event"] == "rollout.rest" and not later(lines, i))
    lines[at]["state"] = "aborted" if lines[at]["state"] != "aborted" else "failed"
    return at


def broken_start(lines: Lines) -> int:
    """A first line that begins in the middle of a story."""
    at = next(index for index in moves(lines, trigger="dispatch") if lines[index]["seq"] == 1)
    lines[at] |= {"trigger": "restore", "source": "aborted", "dest": "pending"}
    after = next(index for index in later(lines, at))
    lines[after] |= {"trigger": "dispatch", "source": "pending", "dest": "streaming"}
    lines[after] |= {"tokens": 0, "new_tokens": 0}
    third = later(lines, at)[1]
    if lines[third]["source"] == "partial":
        lines[third] |= {"source": "streaming", "new_tokens": lines[third]["tokens"]}
    return at


def broken_gate(lines: Lines) -> int:
    """A gate that goes on from another state than it was in."""
    at = next(
        i for i, line in enumerate(lines) if line["event"] == "gate.transition" and line["source"] == "paused"
    )
    lines[at] |= {"source": "pausing"}
    return at


def missing_line(lines: Lines) -> int:
    """A line lost from the middle of a story."""
    at = next(moves(lines, trigger="observe"))
    after = later(lines, at)[0]
    del lines[at]
    return after - 1


def missing_first_line(lines: Lines) -> int:
    """The first line lost."""
    at = next(index for index in moves(lines, trigger="dispatch") if lines[index]["seq"] == 1)
    after = later(lines, at)[0]
    del lines[at]
    return after - 1


def doubled_line(lines: Lines) -> int:
    """A line written twice."""
    at = next(moves(lines, trigger="observe"))
    lines.insert(at + 1, copy.deepcopy(lines[at]))
    return at + 1


def after_final(lines: Lines) -> int:
    """A completed rollout fails."""
    at = next(
        i
        for i, line in enumerate(lines)
        if line["event"] == "rollout.rest"
        and line["state"] == "completed"
        and not later(lines, i)
        and len(processes_of(lines, line["rollout_id"])) == 1
    )
    before = next(lines[i] for i in reversed(chain(lines, at)) if lines[i]["event"] == "rollout.transition")
    extra = {
        **before,
        "seq": lines[at]["seq"] + 1,
        "source": "completed",
        "trigger": "reject",
        "dest": "failed",
    }
    extra |= {"ts": lines[at]["ts"], "new_tokens": 0, "outcome": None, "finish_reason": None}
    lines.insert(at + 1, extra)
    return at + 1


def after_final_elsewhere(lines: Lines) -> int:
    """A process brings a completed rollout back as aborted, though the log before it was closed."""
    shut = closed(lines)
    at = next(
        i
        for i, line in enumerate(lines)
        if line["event"] == "rollout.restored"
        and line["state"] == "completed"
        and line["from_process"] in shut
        and len(chain(lines, i)) == 1
    )
    lines[at]["state"] = "aborted"
    return at


def second_attempt(lines: Lines) -> int:
    """The end of a request that nobody sent, while another is in flight."""
    at = next(moves(lines, trigger="finish", source="partial"))
    for index in [at, *later(lines, at)]:
        lines[index] |= {"attempt": lines[index]["attempt"] + 1, "rid": "f" * 32}
    return at


def second_dispatch(lines: Lines) -> int:
    """A request sent while one is in flight."""
    at = next(
        index for index in moves(lines, trigger="finish", source="partial") if lines[index]["attempt"] == 1
    )
    observed = next(i for i in chain(lines, at) if lines[i].get("trigger") == "observe")
    lines[observed] |= {
        "trigger": "dispatch",
        "source": "pending",
        "dest": "streaming",
        "attempt": 2,
        "rid": "f" * 32,
    }
    lines[observed] |= {"tokens": 0, "new_tokens": 0}
    lines[at] |= {"source": "streaming", "new_tokens": lines[at]["tokens"]}
    for index in later(lines, observed):
        lines[index] |= {"attempt": 2, "rid": "f" * 32}
    return observed


def two_processes(lines: Lines) -> int:
    """Another process takes a rollout over and sends it, while the first one still has it in flight."""
    at = next(index for index in moves(lines, trigger="finish", source="partial") if lines[index]["seq"] == 3)
    ours, middle = lines[at], lines[at]["ts"] - 0.001
    process = ours["process_id"]
    lines[:] = [line for line in lines if (line["event"], line["process_id"]) != ("engine.stopped", process)]
    at = next(index for index, line in enumerate(lines) if line is ours)
    other = {"process_id": "other-1", "run_id": ours["run_id"], "v": 1, "step": None}
    started = next(line for line in lines if line["event"] == "engine.started")
    mine = {key: ours[key] for key in ("rollout_id", "group_id", "group_size")} | other
    move = {key: ours[key] for key in ("weight_version", "current_version", "reason", "detail", "worker")}
    move |= {
        "event": "rollout.transition",
        "outcome": None,
        "finish_reason": None,
        "dwell_s": 0.0,
        "dropped_tokens": 0,
    }
    move |= {"tokens": 0, "new_tokens": 0, **mine}
    lines += [
        {**started, **other, "ts": middle},
        {
            "event": "rollout.restored",
            "ts": middle,
            "seq": 1,
            "attempt": 1,
            "rid": None,
            "state": "aborted",
            "tokens": 0,
        }
        | {
            "dropped_tokens": 0,
            "reason": "crash",
            "disposition": "none",
            "from_process": process,
            "epoch": 2,
            **mine,
        },
        {**move, "ts": middle, "seq": 2, "attempt": 1, "rid": None, "trigger": "restore"}
        | {"source": "aborted", "dest": "pending"},
        {**move, "ts": middle, "seq": 3, "attempt": 2, "rid": "e" * 32, "trigger": "dispatch"}
        | {"source": "pending", "dest": "streaming"},
    ]
    return at


def tokens_fell(lines: Lines) -> int:
    """Tokens that go away at the end."""
    summed = delivered_groups(lines)
    at = next(
        index
        for index in moves(lines, trigger="finish", source="partial")
        if lines[index]["seq"] == 3
        and lines[index]["group_id"] not in summed
        and len(processes_of(lines, lines[index]["rollout_id"])) == 1
    )
    lines[at]["tokens"] = 0
    for index in later(lines, at):
        lines[index] |= {"tokens": 0} | ({"spans": []} if "spans" in lines[index] else {})
    return at


def dropped_at_the_end(lines: Lines) -> int:
    """Tokens dropped by a move that may not."""
    at = next(moves(lines, trigger="finish", source="partial"))
    lines[at]["dropped_tokens"] = 1
    return at


def tokens_fell_elsewhere(lines: Lines) -> int:
    """A process brings a rollout back with fewer tokens, and says nothing, though the log before it was closed."""
    shut = closed(lines)
    at = next(
        i
        for i, line in enumerate(lines)
        if line["event"] == "rollout.restored"
        and line["from_process"] in shut
        and line["tokens"] > 0
        and len(chain(lines, i)) == 1
    )
    lines[at]["tokens"] -= 1
    return at


def tokens_fell_elsewhere_unsaid(lines: Lines) -> int:
    """The same, with null where it would be said."""
    at = tokens_fell_elsewhere(lines)
    lines[at]["dropped_tokens"] = None
    return at


def tokens_out_of_nothing(lines: Lines) -> int:
    """A rest with more tokens than the move before it left."""
    summed = delivered_groups(lines)
    at = next(
        i
        for i, line in enumerate(lines)
        if line["event"] == "rollout.rest"
        and line["group_id"] not in summed
        and len(processes_of(lines, line["rollout_id"])) == 1
        and all(lines[j]["event"] == "rollout.disposition" for j in later(lines, i))
    )
    for index in [at, *later(lines, at)]:
        lines[index]["tokens"] += 5
    return at


def first_tokens_wrong(lines: Lines) -> int:
    """First tokens that are not as many as the line says it brought."""
    at = next(index for index in moves(lines, trigger="observe") if lines[index]["seq"] == 2)
    lines[at]["new_tokens"] += 1
    return at


def spans_overlap(lines: Lines) -> int:
    """Weight versions of more tokens than there are."""
    at = next(i for i, line in enumerate(lines) if line["event"] == "rollout.rest" and line["spans"])
    lines[at]["spans"][-1][2] += 1
    return at


def group_sum(lines: Lines) -> int:
    """A group that delivers more tokens than its members have."""
    at = next(i for i, line in enumerate(lines) if line["event"] == "group.delivered")
    lines[at]["tokens"] += 1
    return at


def no_end(lines: Lines) -> int:
    """A log that was closed, and a rollout that was still streaming."""
    shut = closed(lines)
    at = next(
        index
        for index in moves(lines, trigger="finish", source="partial")
        if lines[index]["process_id"] in shut
        and lines[index]["seq"] > 1
        and len(processes_of(lines, lines[index]["rollout_id"])) == 1
    )
    before = max(index for index in chain(lines, at) if index < at)
    for index in reversed([at, *later(lines, at)]):
        del lines[index]
    return before


def abort_unresolved(lines: Lines) -> int:
    """A log that was closed, and an abort without an outcome."""
    shut = closed(lines)
    at = next(
        index
        for index in moves(lines, source="aborting", trigger="finish")
        if lines[index]["process_id"] in shut and len(processes_of(lines, lines[index]["rollout_id"])) == 1
    )
    before = max(index for index in chain(lines, at) if index < at)
    for index in reversed([at, *later(lines, at)]):
        del lines[index]
    return before


def delivered_twice(lines: Lines) -> int:
    """A rollout handed over again."""
    at = next(
        i
        for i, line in enumerate(lines)
        if line["event"] == "rollout.disposition"
        and line["disposition"] == "delivered"
        and not later(lines, i)
    )
    lines.insert(at + 1, {**lines[at], "seq": lines[at]["seq"] + 1})
    return at + 1


def delivered_in_two_processes(lines: Lines) -> int:
    """A rollout handed over before a crash, and after it by another process."""
    process = next(line["process_id"] for line in reversed(lines) if line["event"] == "engine.started")
    at = next(
        i
        for i, line in enumerate(lines)
        if line["event"] == "rollout.disposition"
        and line["disposition"] == "delivered"
        and not later(lines, i)
    )
    told = lines[at]
    lines[:] = [
        line
        for line in lines
        if (line["event"], line["process_id"]) != ("engine.stopped", told["process_id"])
    ]
    back = {
        key: told[key]
        for key in ("v", "run_id", "step", "rollout_id", "group_id", "group_size", "attempt", "rid")
    }
    back |= {
        "event": "rollout.restored",
        "ts": lines[-1]["ts"],
        "process_id": process,
        "seq": 1,
        "tokens": told["tokens"],
    }
    back |= {"state": "completed", "dropped_tokens": 0, "reason": "crash", "disposition": "none", "epoch": 9}
    back |= {"from_process": told["process_id"]}
    lines += [back, {**told, "process_id": process, "seq": 2, "ts": lines[-1]["ts"]}]
    return len(lines) - 1


def group_twice(lines: Lines) -> int:
    """A group handed over again."""
    at = next(i for i, line in enumerate(lines) if line["event"] == "group.delivered")
    lines.insert(at + 1, copy.deepcopy(lines[at]))
    return at + 1


def sent_while_paused(lines: Lines) -> int:
    """A request sent while weights are being updated."""
    paused = next(
        i for i, line in enumerate(lines) if line["event"] == "gate.transition" and line["dest"] == "pausing"
    )
    at = max(index for index in moves(lines[:paused], trigger="dispatch"))
    gate = lines[paused]
    assert gate["process_id"] == lines[at]["process_id"]
    lines.insert(at, {**gate, "ts": lines[at]["ts"]})
    lines.insert(
        at + 2, {**gate, "ts": lines[at]["ts"], "trigger": "resume", "source": "pausing", "dest": "open"}
    )
    return at + 1


FAULTS: list[tuple[str, Callable[[Lines], int]]] = [
    ("undeclared_move", undeclared_move),
    ("undeclared_move", undeclared_word),
    ("undeclared_move", undeclared_first_move),
    ("undeclared_move", undeclared_gate_move),
    ("broken_chain", broken_chain),
    ("broken_chain", broken_rest),
    ("broken_chain", broken_start),
    ("broken_chain", broken_gate),
    ("seq_gap", missing_line),
    ("seq_gap", missing_first_line),
    ("seq_gap", doubled_line),
    ("after_final", after_final),
    ("after_final", after_final_elsewhere),
    ("two_live_attempts", second_attempt),
    ("two_live_attempts", second_dispatch),
    ("two_live_attempts", two_processes),
    ("tokens_fell", tokens_fell),
    ("tokens_fell", dropped_at_the_end),
    ("tokens_fell", tokens_fell_elsewhere),
    ("tokens_fell", tokens_fell_elsewhere_unsaid),
    ("tokens_mismatch", tokens_out_of_nothing),
    ("tokens_mismatch", first_tokens_wrong),
    ("tokens_mismatch", spans_overlap),
    ("tokens_mismatch", group_sum),
    ("no_end", no_end),
    ("abort_unresolved", abort_unresolved),
    ("delivered_twice", delivered_twice),
    ("delivered_twice", delivered_in_two_processes),
    ("delivered_twice", group_twice),
    ("dispatch_gate_closed", sent_while_paused),
]
