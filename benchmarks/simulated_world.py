"""A simulated run, from which `generate_log` writes logs: the world, its processes and the lines they emit.

Every move is looked up in the real table, so that what is written is legal by construction.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from lifecycle.log import records as r
from lifecycle.machine import GATE, ROLLOUT

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
