"""Write a realistic lifecycle log of any length: legal by the real table, deterministic by seed.

    python benchmarks/generate_log.py --lines 5000000 --seed 1 --out big.jsonl

A run of training steps: groups of eight samples, an over-sampled target, aborts and their outcomes, carried
partials, weight updates, lost and refused requests, retries, crashes and restarts under a new process id.
Tests use `write_log` in small.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from lifecycle.log import records as r
from lifecycle.machine import GATE, ROLLOUT, TABLES
from lifecycle.states import FINAL_STATES, REST_STATES, RolloutState

GROUP_SIZE = 8
START = 1_764_400_000.0
WORKERS = tuple(f"http://10.0.0.{n}:30000" for n in range(1, 9))
LAST_WORDS = {
    "finish": "finished",
    "lose": "lost",
    "expire": "expired",
    "reject": "rejected",
    "confirm": "confirmed",
}


@dataclass(slots=True)
class Sim:
    """One simulated rollout: where it stands, and what it will become."""

    id: str
    group: Group
    length: int
    submitted: float
    state: str = "pending"
    seq: int = 0
    attempt: int = 0
    rid: str | None = None
    tokens: int = 0
    dropped: int = 0
    spans: list[tuple[str, int, int, str]] = field(default_factory=list)
    entered: float = 0.0
    first_token: float | None = None
    worker: str | None = None
    carries: int = 0
    disposition: str = "none"
    from_snapshot: bool = False
    left_in: str | None = None
    ended: float = 0.0


@dataclass(slots=True)
class Group:
    """The samples of one prompt."""

    id: str
    members: list[Sim] = field(default_factory=list)
    size: int = GROUP_SIZE
    started: float = 0.0
    over: bool = False


Entry = tuple[float, int, r.Record]


class Process:
    """One process of a run: it emits records, and knows which moves the table allows."""

    def __init__(self, world: World, number: int, now: float) -> None:
        self.world = world
        self.rng = world.rng
        self.now = now
        self.id = f"trainer-{4000 + number}-{world.rng.getrandbits(32):08x}"
        self.run_id = world.run_id
        self.step: int | None = None
        self.out: list[Entry] = []
        self.gate = "open"
        self.gate_since = now

    def put(self, record_type: type[r.Record], ts: float, **fields: Any) -> None:
        """Add one line at time `ts`."""
        record = record_type(
            ts=round(ts, 6), run_id=self.run_id, process_id=self.id, step=self.step, **fields
        )
        self.out.append((ts, len(self.out), record))

    def named(self, sim: Sim) -> dict[str, Any]:
        """Count one more line of this rollout."""
        sim.seq += 1
        return {
            "seq": sim.seq,
            "rollout_id": sim.id,
            "group_id": sim.group.id,
            "group_size": sim.group.size,
            "attempt": sim.attempt,
            "rid": sim.rid,
        }

    def move(self, sim: Sim, trigger: str, ts: float, *, new: int = 0, dropped: int = 0, **more: Any) -> None:
        """Take one arc of the real table and log it."""
        source, dest = sim.state, str(ROLLOUT.lookup[sim.state, trigger])  # type: ignore[index]
        more.setdefault("reason", None)
        self.put(
            r.RolloutTransition,
            ts,
            **self.named(sim),
            trigger=trigger,
            source=source,
            dest=dest,
            tokens=sim.tokens,
            new_tokens=new,
            dropped_tokens=dropped,
            weight_version=sim.spans[-1][0] if sim.spans else None,
            current_version=self.world.version,
            detail=more.get("detail"),
            reason=more["reason"],
            outcome=LAST_WORDS.get(trigger) if source == "aborting" else None,
            finish_reason=more["reason"] if trigger == "finish" else None,
            dwell_s=round(ts - sim.entered, 6),
            worker=sim.worker if trigger != "dispatch" else None,
        )
        if dest != source:
            sim.state, sim.entered = dest, ts

    def rest(self, sim: Sim, ts: float, reason: str | None, outcome: str | None = None) -> None:
        """Log that the rollout came to rest."""
        sim.ended = ts
        self.put(
            r.RolloutRest,
            ts,
            **self.named(sim),
            state=sim.state,
            tokens=sim.tokens,
            observed_tokens=sim.tokens + sim.dropped,
            spans=list(sim.spans),
            disposition=sim.disposition,
            reason=reason,
            outcome=outcome,
            finish_reason=reason if sim.state == "completed" else None,
            current_version=self.world.version,
            duration_s=round(ts - sim.submitted, 6),
            first_token_s=None if sim.first_token is None else round(sim.first_token - sim.submitted, 6),
            worker=sim.worker,
            carries=sim.carries,
            versions=len({span[0] for span in sim.spans}),
        )

    def dispose(self, sim: Sim, disposition: str, ts: float, reason: str | None = None) -> None:
        """Log what the caller did with it."""
        sim.disposition = disposition
        oldest = int(sim.spans[0][0]) if sim.spans else None
        lag = None if oldest is None else int(self.world.version) - oldest
        self.put(
            r.RolloutDisposition,
            ts,
            **self.named(sim),
            disposition=disposition,
            state=sim.state,
            tokens=sim.tokens,
            reason=reason,
            lag=lag,
        )

    def restored(self, sim: Sim, ts: float, dropped: int, reason: str, from_process: str | None) -> None:
        """Begin a chain from a snapshot."""
        sim.seq, sim.entered, sim.dropped = 0, ts, sim.dropped + dropped
        self.put(
            r.RolloutRestored,
            ts,
            **self.named(sim),
            state=sim.state,
            tokens=sim.tokens,
            dropped_tokens=dropped,
            reason=reason,
            disposition=sim.disposition,
            from_process=from_process,
            epoch=self.world.epoch,
        )

    def of_group(
        self, kind: type[r.Record], group: Group, ts: float, reason: str | None, **more: Any
    ) -> None:
        """Log an event of a group."""
        self.put(
            kind,
            ts,
            group_id=group.id,
            group_size=group.size,
            members=[sim.id for sim in group.members],
            tokens=sum(sim.tokens for sim in group.members),
            duration_s=round(ts - group.started, 6),
            reason=reason,
            **more,
        )

    def turn(self, trigger: str, ts: float, **more: Any) -> None:
        """Move the gate and log it."""
        dest = str(GATE.lookup[self.gate, trigger])  # type: ignore[index]
        self.put(
            r.GateTransition,
            ts,
            trigger=trigger,
            source=self.gate,
            dest=dest,
            mode=more.get("mode"),
            version=more.get("version"),
            current_version=self.world.version,
            reason=more.get("reason"),
            dwell_s=round(ts - self.gate_since, 6),
        )
        if dest != self.gate:
            self.gate, self.gate_since = dest, ts

    def take(self, until: float | None = None) -> list[r.Record]:
        """Hand out what has been gathered, in the order of time; with `until`, what comes later is lost."""
        self.out.sort(key=lambda entry: entry[:2])
        taken = [record for ts, _, record in self.out if until is None or ts <= until]
        self.out = []
        return taken


class World:
    """What outlives a process: the run, its weights, its open groups."""

    def __init__(self, seed: int, groups_per_step: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.run_id = f"run{self.rng.getrandbits(40):010x}"
        self.number = 0
        self.epoch = 0
        self.version = "1"
        self.step = 0
        self.serial = 0
        self.groups_per_step = groups_per_step
        self.carried: list[Group] = []

    def fresh_groups(self, now: float, count: int) -> list[Group]:
        """New prompts."""
        made = []
        for _ in range(count):
            group = Group(f"p{self.serial:06d}", started=now)
            self.serial += 1
            for index in range(GROUP_SIZE):
                length = min(16_384, max(8, int(self.rng.lognormvariate(6.6, 0.8))))
                group.members.append(Sim(f"{group.id}-{index}", group, length, now, entered=now))
            made.append(group)
        return made


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


def generate(
    lines: int, seed: int = 1, *, groups_per_step: int = 128, crash_every: int = 0, restart_every: int = 0
) -> Iterator[tuple[str, r.Record]]:
    """At least `lines` records with the id of their process, whole steps at a time; the last process stops in order.

    `crash_every` and `restart_every` count steps: a process dies in the middle of every such step, or is stopped
    and started again after it.
    """
    world = World(seed, groups_per_step)
    process = start_process(world, START)
    written = 0
    while written < lines:
        process.step = world.step
        groups = world.carried + world.fresh_groups(process.now, groups_per_step - len(world.carried) // 2)
        begun = process.now
        before = [replace(sim, spans=list(sim.spans)) for group in groups for sim in group.members]
        run_step(process, groups)
        world.step += 1
        if crash_every and world.step % crash_every == 0:
            name = process.id
            process, taken = crash(process, groups, before, begun + 15.0)
        else:
            update_weights(process)
            name, ended = process.id, False
            if restart_every and world.step % restart_every == 0:
                stop_process(process, world.carried)
                ended = True
            taken = process.take()
            if ended:
                process = start_process(world, process.now + 60.0)
        for record in taken:
            yield name, record
        written += len(taken)
    stop_process(process, world.carried)
    for record in process.take():
        yield process.id, record


def write_log(path: Path, lines: int, seed: int = 1, *, split: bool = False, **settings: Any) -> list[Path]:
    """Write `generate(…)` to `path`, or with `split` to one file per process beside it. Returns the files."""
    encoder = msgspec.json.Encoder()
    buffers: dict[str, bytearray] = {}
    files: list[Path] = []
    for name, record in generate(lines, seed, **settings):
        key = name if split else ""
        if key not in buffers:
            buffers[key] = bytearray()
            files.append(path.with_name(f"{path.stem}-{len(files)}{path.suffix}") if split else path)
            files[-1].write_bytes(b"")
        buffer = buffers[key]
        buffer += encoder.encode(record)
        buffer += b"\n"
        if len(buffer) > 4_000_000:
            _append(files[list(buffers).index(key)], buffer)
    for file, buffer in zip(files, buffers.values(), strict=True):
        _append(file, buffer)
    return files


def _append(path: Path, buffer: bytearray) -> None:
    with path.open("ab") as file:
        file.write(buffer)
    buffer.clear()


def main() -> None:
    """Write a log and say how long it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups-per-step", type=int, default=128)
    parser.add_argument("--crash-every", type=int, default=0, help="a process dies in every n-th step")
    parser.add_argument(
        "--restart-every", type=int, default=0, help="a process is replaced after every n-th step"
    )
    parser.add_argument("--split", action="store_true", help="one file per process")
    given = parser.parse_args()
    begun = time.perf_counter()
    files = write_log(
        given.out,
        given.lines,
        given.seed,
        split=given.split,
        groups_per_step=given.groups_per_step,
        crash_every=given.crash_every,
        restart_every=given.restart_every,
    )
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} file(s), {size / 1e6:.0f} MB in {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
