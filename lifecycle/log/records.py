"""The schema of the log, one class per event. The class is the documentation: every key of it is on every line.

Common keys: `v` schema version; `ts` seconds since the epoch (wall clock); `seq` counts the lines of one rollout
within one process, from 1, without gaps; `run_id` names the run, `process_id` the process; `step` is the training
step the caller set, null if none. Durations end in `_s` and are seconds of the monotonic clock.
"""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA_VERSION = 1


class Record(msgspec.Struct, kw_only=True, tag_field="event", forbid_unknown_fields=False):
    """What every line has."""

    v: int = SCHEMA_VERSION
    ts: float
    run_id: str
    process_id: str
    step: int | None = None


class RolloutRecord(Record, kw_only=True):
    """What every line about one rollout has."""

    seq: int
    rollout_id: str
    group_id: str
    group_size: int
    attempt: int
    rid: str | None


class RolloutTransition(RolloutRecord, kw_only=True, tag="rollout.transition"):
    """One arc was taken. `tokens` is the total after it, `new_tokens` what it brought, `dropped_tokens` what it took.

    `weight_version` is that of the newest token, `current_version` the label last published by the engine;
    `dwell_s` is the time spent in `source`.
    """

    trigger: str
    source: str
    dest: str
    tokens: int
    new_tokens: int
    dropped_tokens: int
    weight_version: str | None
    current_version: str | None
    reason: str | None
    detail: str | None
    outcome: str | None
    finish_reason: str | None
    dwell_s: float
    worker: str | None


class RolloutRestored(RolloutRecord, kw_only=True, tag="rollout.restored"):
    """A rollout came from a snapshot: a legal start of a chain, in `state`. `dropped_tokens` were lost with a crash."""

    state: str
    tokens: int
    dropped_tokens: int
    reason: str | None
    disposition: str
    from_process: str | None
    epoch: int


class RolloutRest(RolloutRecord, kw_only=True, tag="rollout.rest"):
    """A rollout came to rest.

    `spans` are [version, start, end, source], `versions` how many different versions they name; `duration_s` counts
    from submit.
    """

    state: str
    tokens: int
    observed_tokens: int
    spans: list[tuple[str, int, int, str]]
    disposition: str
    reason: str | None
    outcome: str | None
    finish_reason: str | None
    current_version: str | None
    duration_s: float
    first_token_s: float | None
    worker: str | None
    carries: int
    versions: int = 0


class RolloutDisposition(RolloutRecord, kw_only=True, tag="rollout.disposition"):
    """The caller's side of a rollout: delivered, filtered, stale or carried. `lag` counts published versions.

    `none` with reason `fenced`: another owner has taken the rollout over, and this process gives up its copy.
    """

    disposition: str
    state: str
    tokens: int
    reason: str | None
    lag: int | None


class GroupRecord(Record, kw_only=True):
    """What every line about a group has: its members by id, and their tokens in sum."""

    group_id: str
    group_size: int
    members: list[str]
    tokens: int
    duration_s: float | None
    reason: str | None


class GroupSettled(GroupRecord, kw_only=True, tag="group.settled"):
    """Every member is final. `straggler_s` is the time between the first and the last member's end."""

    straggler_s: float


class GroupDelivered(GroupRecord, kw_only=True, tag="group.delivered"):
    """The group was handed to the caller; happens once."""


class GroupFailed(GroupRecord, kw_only=True, tag="group.failed"):
    """The group cannot be delivered: a member failed or was discarded."""


class GroupFiltered(GroupRecord, kw_only=True, tag="group.filtered"):
    """The caller's filter refused it."""


class GroupStale(GroupRecord, kw_only=True, tag="group.stale"):
    """It was complete, and too old for the caller's policy."""


class GroupCarried(GroupRecord, kw_only=True, tag="group.carried"):
    """It goes on in the next round."""


class GateTransition(Record, kw_only=True, tag="gate.transition"):
    """The gate moved, or a trigger left it where it was. `version` is the label that an update publishes."""

    trigger: str
    source: str
    dest: str
    mode: str | None
    version: str | None
    current_version: str | None
    reason: str | None
    dwell_s: float


class GateReceipt(Record, kw_only=True, tag="gate.receipt"):
    """What one worker answered when it was paused, resumed or asked for its load."""

    action: str
    worker: str
    status: str
    detail: str | None
    version: str | None
    running: int | None
    waiting: int | None


class AbortSent(Record, kw_only=True, tag="abort.sent"):
    """One worker's answer to a batch of aborts; `round` counts re-sends from 1, `pending` how many were unresolved."""

    rollouts: int
    rids: list[str]
    strategy: str
    worker: str
    status: str
    detail: str | None
    requests: int
    latency_s: float
    round: int
    pending: int


class SnapshotSaved(Record, kw_only=True, tag="snapshot.saved"):
    """One durable write of the store: how many snapshots and tails it held, and what it took."""

    snapshots: int
    tails: int
    marks: int
    bytes: int
    duration_s: float
    backlog: int


class SnapshotFailed(Record, kw_only=True, tag="snapshot.failed"):
    """The store refused a write, and it is tried again in `retry_s`; or (`tries` 0) it does not answer at all."""

    operations: int
    error: str
    tries: int
    backlog: int
    retry_s: float


class StreamAnomaly(Record, kw_only=True, tag="stream.anomaly"):
    """Something that changes nothing and should be known. `rid` may belong to an attempt that is over."""

    rollout_id: str
    attempt: int
    rid: str | None
    kind: str
    detail: str


class BackendOutage(Record, kw_only=True, tag="backend.outage"):
    """Dispatching waits `retry_s` because servers cannot be reached or refuse load."""

    reason: str
    detail: str | None
    failures: int
    retry_s: float


class BackendRecovered(Record, kw_only=True, tag="backend.recovered"):
    """A stream began again after an outage of `outage_s`."""

    outage_s: float


class EngineStarted(Record, kw_only=True, tag="engine.started"):
    """The first line of a process: both tables, versions and settings; no secrets."""

    version: str
    python: str
    tables: dict[str, Any]
    settings: dict[str, Any]


class EngineStopped(Record, kw_only=True, tag="engine.stopped"):
    """The last line of a process that ended in order: rollouts by state, and the ledger."""

    reason: str
    states: dict[str, int]
    ledger: dict[str, Any]


RECORD_TYPES: tuple[type[Record], ...] = (
    RolloutTransition,
    RolloutRestored,
    RolloutRest,
    RolloutDisposition,
    GroupSettled,
    GroupDelivered,
    GroupFailed,
    GroupFiltered,
    GroupStale,
    GroupCarried,
    GateTransition,
    GateReceipt,
    AbortSent,
    SnapshotSaved,
    SnapshotFailed,
    StreamAnomaly,
    BackendOutage,
    BackendRecovered,
    EngineStarted,
    EngineStopped,
)

AnyRecord = (
    RolloutTransition
    | RolloutRestored
    | RolloutRest
    | RolloutDisposition
    | GroupSettled
    | GroupDelivered
    | GroupFailed
    | GroupFiltered
    | GroupStale
    | GroupCarried
    | GateTransition
    | GateReceipt
    | AbortSent
    | SnapshotSaved
    | SnapshotFailed
    | StreamAnomaly
    | BackendOutage
    | BackendRecovered
    | EngineStarted
    | EngineStopped
)


def event_name(record: Record | type[Record]) -> str:
    """The dotted name a record is written under."""
    return str(record.__struct_config__.tag)


def columns() -> dict[str, str]:
    """Every key that occurs in any event, with its JSON kind (`str`, `int`, `float`, `list`, `dict`), for readers."""
    found: dict[str, str] = {"event": "str"}
    for record_type in RECORD_TYPES:
        for field in msgspec.structs.fields(record_type):
            kind = str(field.type).replace("<class '", "").replace("'>", "")
            found.setdefault(field.name, kind.split("|")[0].split("[")[0].strip())
    return found
