"""Logs as the engine writes them, made by walking the real machine with a seeded random."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from lifecycle.log.records import (
    EngineStarted,
    GateTransition,
    Record,
    RolloutRestored,
    RolloutTransition,
)
from lifecycle.machine import GATE, ROLLOUT, GateCursor, RolloutCursor
from lifecycle.states import FINAL_STATES, GateState, GateTrigger, RolloutState, Trigger

R, T = RolloutState, Trigger

# How likely each way out is, and how long it usually takes, in seconds.
WAYS: dict[RolloutState, dict[Trigger, tuple[float, float]]] = {
    R.PENDING: {T.DISPATCH: (97, 0.08), T.ABORT: (2, 0.2), T.REJECT: (0.5, 0.01), T.DISCARD: (0.5, 1.0)},
    R.STREAMING: {T.OBSERVE: (94, 0.4), T.ABORT: (3, 0.3), T.LOSE: (2, 1.0), T.PREEMPT: (1, 0.6)},
    R.PARTIAL: {T.FINISH: (76, 14.0), T.ABORT: (19, 9.0), T.PREEMPT: (3, 6.0), T.LOSE: (2, 8.0)},
    R.ABORTING: {T.CONFIRM: (88, 0.12), T.FINISH: (8, 0.05), T.LOSE: (3, 0.3), T.EXPIRE: (1, 5.0)},
    R.ABORTED: {T.RESTORE: (94, 3.0), T.EXHAUST: (2, 0.01), T.DISCARD: (4, 8.0)},
}
COMMON = {"run_id": "run-1", "process_id": "host-1-aa"}
START = 1_790_000_000.0


def engine_started(ts: float = START) -> EngineStarted:
    """The first line of a process."""
    tables = {"rollout": ROLLOUT.as_dict(), "gate": GATE.as_dict()}
    return EngineStarted(ts=ts, version="0.1.0", python="3.11", tables=tables, settings={}, **COMMON)


def transition(rollout_id: str = "r-0", **changes: object) -> RolloutTransition:
    """One transition line with sensible values for what is not given."""
    values: dict[str, object] = {
        "ts": START,
        "seq": 1,
        "rollout_id": rollout_id,
        "group_id": "g-0",
        "group_size": 8,
        "attempt": 1,
        "rid": "0" * 32,
        "trigger": "dispatch",
        "source": "pending",
        "dest": "streaming",
        "tokens": 0,
        "new_tokens": 0,
        "dropped_tokens": 0,
        "weight_version": None,
        "current_version": "7",
        "reason": None,
        "detail": None,
        "outcome": None,
        "finish_reason": None,
        "dwell_s": 0.1,
        "worker": "http://10.0.0.1:30000",
    }
    return RolloutTransition(**COMMON, **(values | changes))  # type: ignore[arg-type]


def walk(rollout_id: str, rng: random.Random, start: float) -> Iterator[RolloutTransition]:
    """The life of one rollout from pending to a final state, with late aborts now and then."""
    cursor, ts, attempt, tokens, seq = RolloutCursor(R.PENDING), start, 0, 0, 0
    worker = None
    while True:
        source = cursor.state
        if source in FINAL_STATES:
            if rng.random() < 0.1:
                cursor.fire(T.ABORT)
                yield transition(
                    rollout_id,
                    ts=ts + 1,
                    seq=seq + 1,
                    trigger="abort",
                    source=str(source),
                    dest=str(source),
                    attempt=attempt,
                    tokens=tokens,
                    dwell_s=1.0,
                    worker=worker,
                )
            return
        triggers = list(WAYS[source])
        trigger = rng.choices(triggers, [WAYS[source][t][0] for t in triggers])[0]
        dwell = rng.lognormvariate(0, 0.6) * WAYS[source][trigger][1]
        dest = cursor.fire(trigger)
        ts, seq = ts + dwell, seq + 1
        new = int(dwell * 90) if source is R.PARTIAL else 4 if trigger is T.OBSERVE else 0
        tokens += new
        if trigger is T.DISPATCH:
            attempt += 1
            worker = f"http://10.0.0.{rng.randint(1, 4)}:30000"
        yield transition(
            rollout_id,
            ts=ts,
            seq=seq,
            trigger=str(trigger),
            source=str(source),
            dest=str(dest),
            attempt=attempt,
            tokens=tokens,
            new_tokens=new,
            dwell_s=dwell,
            worker=worker,
            reason="weight_update" if trigger is T.ABORT else None,
            outcome="confirmed" if trigger is T.CONFIRM else None,
        )


def gate_walk(rounds: int, rng: random.Random) -> Iterator[GateTransition]:
    """Weight updates one after the other, and the end."""
    cursor, ts, last = GateCursor(GateState.OPEN), START, START
    story = [GateTrigger.PAUSE, GateTrigger.SETTLE, GateTrigger.RESUME] * rounds + [GateTrigger.CLOSE]
    for trigger in story:
        source = cursor.state
        dest = cursor.fire(trigger)
        ts += rng.lognormvariate(0, 0.4) * (60 if trigger is GateTrigger.PAUSE else 2)
        yield GateTransition(
            ts=ts,
            trigger=str(trigger),
            source=str(source),
            dest=str(dest),
            mode="abort",
            version="8",
            current_version="7",
            reason=None,
            dwell_s=ts - last,
            **COMMON,
        )
        last = ts


def restored(rollout_id: str, ts: float, seq: int = 1) -> RolloutRestored:
    """Another process brought the rollout back from its snapshot."""
    return RolloutRestored(
        ts=ts,
        run_id="run-1",
        process_id="host-2-bb",
        seq=seq,
        rollout_id=rollout_id,
        group_id="g-0",
        group_size=8,
        attempt=1,
        rid=None,
        state="aborted",
        tokens=90,
        dropped_tokens=6,
        reason="crash",
        disposition="none",
        from_process="host-1-aa",
        epoch=2,
    )


def many(rollouts: int, seed: int = 1) -> list[Record]:
    """A whole run: the first line, rollouts mixed in time, weight updates."""
    rng = random.Random(seed)
    lives = [record for n in range(rollouts) for record in walk(f"r-{n}", rng, START + n * 0.2)]
    records: list[Record] = [*lives, *gate_walk(12, rng)]
    return [engine_started(), *sorted(records, key=lambda record: record.ts)]


def encode(records: Iterable[Record]) -> bytes:
    """JSON lines."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def save(path: Path, records: Iterable[Record]) -> Path:
    """Write the records to `path` and return it."""
    path.write_bytes(encode(records))
    return path
