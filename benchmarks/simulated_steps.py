"""What happens in a simulated run: attempts and their ends, steps, hand-over, weight updates, stops and crashes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.simulated_world import LAST_WORDS, WORKERS, Group, Process, Sim, World
from lifecycle.log import records as r
from lifecycle.machine import TABLES
from lifecycle.states import FINAL_STATES, REST_STATES, RolloutState


def start_process(world: World, now: float) -> Process:
    """The first line, and rollouts brought back from the store."""
    process = Process(world, world.number, now)
    world.number += 1
    world.epoch += 1
    settings = {"max_in_flight": 1024, "abort_strategy": "fanout", "seed": world.seed}
    tables = {name: table.as_dict() for name, table in TABLES.items()}
    process.put(r.EngineStarted, now, version="0.1.0", python="3.11.7", tables=tables, settings=settings)
    return process


def fly(process: Process, sim: Sim, at: float, deadline: float) -> None:
    """One rollout from `pending` to its rest in this step, or to `aborting` at the deadline."""
    rng, now = process.rng, at
    for _ in range(4):
        if now >= deadline:
            process.move(sim, "abort", deadline, reason="over_sampled")
            process.rest(sim, deadline, "over_sampled", "never_sent")
            return
        now, again = attempt(process, sim, now, deadline)
        if not again:
            return
        reason = "preempted" if again == "preempt" else "backoff"
        restart = rng.random() < 0.05 and sim.tokens > 0
        dropped = sim.tokens if restart else 0
        if restart:
            sim.tokens, sim.dropped, sim.spans = 0, sim.dropped + dropped, []
        process.move(sim, "restore", now, dropped=dropped, reason=reason)
        now += rng.uniform(0.1, 0.4)
    if now >= deadline:
        process.move(sim, "abort", deadline, reason="over_sampled")
        process.rest(sim, deadline, "over_sampled", "never_sent")
    else:
        process.move(sim, "reject", now, reason="refused", detail="HTTP 400: context length exceeded")
        process.rest(sim, now, "refused")


def attempt(process: Process, sim: Sim, now: float, deadline: float) -> tuple[float, str]:
    """One request. Returns when it was over, and the trigger if another attempt should follow, else ''."""
    rng = process.rng
    worker = rng.randrange(len(WORKERS))
    slow = 1.8 if worker == 5 else 1.0
    sim.rid, sim.worker = f"{rng.getrandbits(128):032x}", WORKERS[worker]
    process.move(sim, "dispatch", now)
    sim.attempt += 1
    # The line of the dispatch belongs to the attempt that it begins.
    process.out[-1][2].attempt = sim.attempt  # type: ignore[attr-defined]
    first = now + rng.lognormvariate(-1.2, 0.5) * slow
    fate = rng.random()
    if fate < 0.012 and first < deadline:
        reason = rng.choice(["unavailable", "unreachable", "disconnected", "rate_limited"])
        process.move(sim, "lose", first, reason=reason)
        return first, "lose"
    if fate < 0.014 and first < deadline:
        process.move(sim, "reject", first, reason="refused", detail="HTTP 400: bad sampling parameters")
        process.rest(sim, first, "refused")
        return first, ""
    if first >= deadline:
        process.move(sim, "abort", deadline, reason="over_sampled")
        return deadline, ""
    sim.tokens += 1
    label(process, sim, sim.tokens - 1)
    sim.first_token = sim.first_token or first
    process.move(sim, "observe", first, new=1)
    if fate > 0.9997:
        process.put(
            r.StreamAnomaly,
            first,
            rollout_id=sim.id,
            attempt=sim.attempt,
            rid=sim.rid,
            kind="late_event",
            detail="a chunk of an attempt that is over",
        )
    return decode(process, sim, first, deadline, fate, 0.012 * slow)


def decode(
    process: Process, sim: Sim, first: float, deadline: float, fate: float, pace: float
) -> tuple[float, str]:
    """From the first token to the end of the attempt, or to the abort at the deadline."""
    left = sim.length - sim.tokens
    end = first + max(0.0, left * pace * process.rng.uniform(0.9, 1.1))
    cut = first + (end - first) * process.rng.random()
    if 0.014 <= fate < 0.02 and cut < deadline:
        grow(process, sim, int(left * (cut - first) / max(end - first, 1e-9)))
        process.move(sim, "preempt", cut, reason="server_abort")
        return cut, "preempt"
    if end < deadline:
        grow(process, sim, left)
        reason = "length" if sim.length >= 4096 else "stop"
        process.move(sim, "finish", end, reason=reason)
        process.rest(sim, end, reason)
        return end, ""
    grow(process, sim, int(left * (deadline - first) / (end - first)))
    process.move(sim, "abort", deadline, reason="over_sampled")
    return deadline, ""


def label(process: Process, sim: Sim, start: int) -> None:
    """Label the tokens from `start` with the present weights."""
    if sim.spans and sim.spans[-1][0] == process.world.version:
        version, begin, _, source = sim.spans.pop()
        sim.spans.append((version, begin, sim.tokens, source))
    elif sim.tokens > start:
        sim.spans.append((process.world.version, start, sim.tokens, "label"))


def grow(process: Process, sim: Sim, count: int) -> None:
    """Tokens that arrive in a state that stays: not logged."""
    sim.tokens += max(0, count)
    label(process, sim, sim.tokens - max(0, count))


def settle_aborts(process: Process, sims: list[Sim], deadline: float, reason: str) -> float:
    """The answers of the servers to the aborts of one step. Returns when the last was over."""
    rng, last = process.rng, deadline
    strategy = rng.choices(["fanout", "abort_all", "close"], [0.7, 0.2, 0.1])[0]
    for start in range(0, len(sims), 64):
        batch = sims[start : start + 64]
        for worker in WORKERS:
            latency = rng.lognormvariate(-4.5, 0.6)
            process.put(
                r.AbortSent,
                deadline + latency,
                rollouts=len(batch),
                rids=[sim.rid for sim in batch if sim.rid],
                strategy=strategy,
                worker=worker,
                status="unreachable" if rng.random() < 0.01 else "accepted",
                detail=None,
                requests=len(batch) if strategy == "fanout" else 1,
                latency_s=round(latency, 6),
                round=1,
                pending=len(batch),
            )
    for sim in sims:
        trigger = rng.choices(["confirm", "finish", "lose", "expire", "reject"], [90, 6, 2.5, 1, 0.5])[0]
        took = (
            5.0 if trigger == "expire" else rng.lognormvariate(-3.0, 0.8) * (2 if strategy == "fanout" else 1)
        )
        grow(process, sim, rng.randrange(4) if sim.tokens else 0)
        sim.length = max(sim.length, sim.tokens)
        why = {"finish": "stop", "reject": "malformed"}.get(trigger, reason)
        detail = "abort_deadline" if trigger == "expire" else None
        process.move(sim, trigger, deadline + took, reason=why, detail=detail)
        process.rest(sim, deadline + took, why, LAST_WORDS[trigger])
        last = max(last, deadline + took)
    return last


def run_step(process: Process, groups: list[Group]) -> None:
    """One training step: everything is dispatched, the slowest are aborted, whole groups are delivered."""
    world, rng, now = process.world, process.rng, process.now
    alive = [sim for group in groups for sim in group.members if sim.state not in FINAL_STATES]
    deadline = now + 18.0 + rng.uniform(0.0, 4.0)
    for sim in (sim for group in groups for sim in group.members if sim.from_snapshot):
        process.restored(sim, now, 0, "resumed", sim.left_in)
        sim.from_snapshot = False
    for sim in alive:
        at = now + rng.random() * 2.0
        if sim.state == "aborted":
            process.move(sim, "restore", at, reason="resumed")
        fly(process, sim, at, deadline)
    aborting = [sim for sim in alive if sim.state == "aborting"]
    for sim in aborting[::200]:
        process.move(sim, "abort", deadline + 0.001, reason="requested")
    process.now = settle_aborts(process, aborting, deadline, "over_sampled") + 0.01
    hand_over(process, groups)
    world.carried = [group for group in groups if not group.over]
    process.put(
        r.SnapshotSaved,
        process.now,
        snapshots=len(alive),
        tails=2 * len(alive),
        marks=len(groups),
        bytes=sum(sim.tokens for sim in alive) * 16,
        duration_s=round(rng.uniform(0.002, 0.02), 6),
        backlog=rng.randrange(3),
    )


def hand_over(process: Process, groups: list[Group]) -> None:
    """Deliver, filter, refuse or carry the groups of a step."""
    rng = process.rng
    for group in groups:
        ends = [sim.ended for sim in group.members]
        states = {sim.state for sim in group.members}
        now = process.now = process.now + 0.0005
        if not states <= FINAL_STATES:
            process.of_group(r.GroupCarried, group, now, "over_sampled")
            kinds = {sim.id: "carried" for sim in group.members if sim.state == "aborted"}
        else:
            process.of_group(
                r.GroupSettled, group, max(ends) + 1e-6, None, straggler_s=round(max(ends) - min(ends), 6)
            )
            group.over = True
            kind, disposition = r.GroupDelivered, "delivered"
            if states != {"completed"}:
                kind, disposition = r.GroupFailed, ""
            elif (fate := rng.random()) < 0.04:
                kind, disposition = (r.GroupFiltered, "filtered") if fate < 0.03 else (r.GroupStale, "stale")
            process.of_group(kind, group, now, None)
            kinds = {sim.id: disposition for sim in group.members if disposition}
        for sim in group.members:
            if sim.id in kinds:
                process.dispose(sim, kinds[sim.id], now)
                sim.carries += kinds[sim.id] == "carried"


def update_weights(process: Process) -> None:
    """Pause, settle, publish, resume."""
    world, rng = process.world, process.rng
    version = str(int(world.version) + 1)
    process.turn("pause", process.now, mode="abort", version=version, reason="weight_update")
    process.now += rng.uniform(0.01, 0.05)
    process.turn("settle", process.now, mode="abort", version=version)
    for worker in WORKERS:
        process.put(
            r.GateReceipt,
            process.now,
            action="load",
            worker=worker,
            status="accepted",
            detail=None,
            version=world.version,
            running=0,
            waiting=0,
        )
    process.now += rng.uniform(2.0, 4.0)
    world.version = version
    process.turn("resume", process.now, mode="abort", version=version)


def stop_process(process: Process, groups: list[Group]) -> None:
    """The last line of a process that ends in order."""
    process.turn("close", process.now, reason="shutdown")
    states = dict.fromkeys(map(str, RolloutState), 0)
    for group in groups:
        for sim in group.members:
            states[sim.state] += 1
            sim.from_snapshot, sim.left_in = True, process.id
    process.put(r.EngineStopped, process.now + 0.01, reason="shutdown", states=states, ledger={})


def crash(
    process: Process, groups: list[Group], before: list[Sim], at: float
) -> tuple[Process, list[r.Record]]:
    """Everything after `at` never happened; another process brings back what the store held."""
    world = process.world
    lines = process.take(until=at)
    last = {record.rollout_id: record for record in lines if isinstance(record, r.RolloutRecord)}
    successor = start_process(world, at + 30.0)
    earlier = iter(before)
    for group in groups:
        group.over = False
        group.members = [
            bring_back(successor, sim, next(earlier), last.get(sim.id), process.id) for sim in group.members
        ]
    world.carried = groups
    successor.now += 1.0
    return successor, lines


def bring_back(process: Process, after: Sim, before: Sim, record: Any, from_process: str) -> Sim:
    """What a snapshot of a rollout would hold after a crash, logged as restored if the log knows it."""
    if record is None and not before.seq:
        return before
    sim = replace(before, spans=list(before.spans), from_snapshot=False)
    held, state = sim.tokens, sim.state
    if record is not None:
        held, sim.attempt, sim.rid = record.tokens, record.attempt, record.rid
        state = record.dest if isinstance(record, r.RolloutTransition) else record.state
        sim.first_token, sim.ended = after.first_token, after.ended
    sim.tokens = held if state in REST_STATES else int(held * process.rng.uniform(0.8, 1.0))
    sim.state = state if state in FINAL_STATES else "aborted"
    sim.length = max(sim.length, sim.tokens)
    sim.spans = [(v, a, min(b, sim.tokens), s) for v, a, b, s in after.spans if a < sim.tokens]
    process.restored(sim, process.now, held - sim.tokens, "crash", from_process)
    return sim
