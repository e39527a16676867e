"""The vocabulary: states, triggers, reasons and outcomes, each with the one line that says what it means.

Nothing here decides anything. The arcs between the states are rows in `lifecycle.machine`.
"""

from __future__ import annotations

from enum import StrEnum


class RolloutState(StrEnum):
    """Where one rollout request stands."""

    PENDING = "pending"
    STREAMING = "streaming"
    PARTIAL = "partial"
    ABORTING = "aborting"
    ABORTED = "aborted"
    COMPLETED = "completed"
    FAILED = "failed"
    DISCARDED = "discarded"


class Trigger(StrEnum):
    """What can happen to a rollout."""

    DISPATCH = "dispatch"
    OBSERVE = "observe"
    FINISH = "finish"
    ABORT = "abort"
    CONFIRM = "confirm"
    PREEMPT = "preempt"
    LOSE = "lose"
    EXPIRE = "expire"
    REJECT = "reject"
    EXHAUST = "exhaust"
    RESTORE = "restore"
    DISCARD = "discard"


class GateState(StrEnum):
    """Whether the engine may dispatch."""

    OPEN = "open"
    PAUSING = "pausing"
    PAUSED = "paused"
    CLOSED = "closed"


class GateTrigger(StrEnum):
    """What can happen to the gate."""

    PAUSE = "pause"
    SETTLE = "settle"
    RESUME = "resume"
    CLOSE = "close"


FINAL_STATES = frozenset({RolloutState.COMPLETED, RolloutState.FAILED, RolloutState.DISCARDED})
"""Nothing leaves these."""

IN_FLIGHT_STATES = frozenset({RolloutState.STREAMING, RolloutState.PARTIAL, RolloutState.ABORTING})
"""A request may be alive on a server."""

REST_STATES = FINAL_STATES | {RolloutState.ABORTED}
"""Nothing happens by itself; `wait()` returns here."""


class Reason(StrEnum):
    """Why a transition was made: an enum, so that logs can be counted. The server's own words go to `detail`."""

    REQUESTED = "requested"  # the caller asked, no more said
    OVER_SAMPLED = "over_sampled"  # the target was reached without this one
    WEIGHT_UPDATE = "weight_update"
    STALLED = "stalled"  # first_token_timeout or idle_timeout
    CANCELLED = "cancelled"  # the task that wanted it was cancelled
    SHUTDOWN = "shutdown"  # the engine is closing, or the process was told to stop
    CRASH = "crash"  # a process died with it in flight; set at restore
    STOP = "stop"  # finished: end of sequence, stop token or stop string
    LENGTH = "length"  # finished: token budget used up
    SERVER_ABORT = "server_abort"  # the server ended it, no status code given
    SERVER_ERROR = "server_error"  # the server ended it with 5xx, or answered 5xx
    REFUSED = "refused"  # the server answered 4xx
    RATE_LIMITED = "rate_limited"  # HTTP 429
    UNAVAILABLE = "unavailable"  # HTTP 503, 502 or 504
    UNREACHABLE = "unreachable"  # no connection could be made
    DISCONNECTED = "disconnected"  # the connection broke under the stream
    WORKER_LOST = "worker_lost"  # the router could not reach the worker it chose
    TRUNCATED = "truncated"  # the stream ended without a terminal chunk
    MALFORMED = "malformed"  # the stream said something that cannot be true
    ABORT_REFUSED = "abort_refused"  # no worker accepted the abort; the stream was closed
    ABORT_DEADLINE = "abort_deadline"  # the abort was not answered in time; the stream was closed
    ATTEMPTS = "attempts"  # max_attempts used up
    STALE = "stale"  # its tokens are older than the caller allows
    BACKOFF = "backoff"  # restored, and waiting before another attempt
    PREEMPTED = "preempted"  # restored after the server ended it unasked
    RESUMED = "resumed"  # restored from a snapshot by the caller
    FENCED = "fenced"  # another owner took it over


class Outcome(StrEnum):
    """How an abort ended."""

    CONFIRMED = "confirmed"  # the server ended it
    FINISHED = "finished"  # it had finished, or finished before the abort arrived
    LOST = "lost"  # the stream ended without an answer
    EXPIRED = "expired"  # no answer until the deadline: a possible leak
    REJECTED = "rejected"  # it failed instead
    NEVER_SENT = "never_sent"  # nothing was in flight


class Disposition(StrEnum):
    """What the caller did with a rollout; separate from its state."""

    NONE = "none"
    DELIVERED = "delivered"
    FILTERED = "filtered"
    STALE = "stale"
    CARRIED = "carried"


class FinishReason(StrEnum):
    """Why the server says a rollout is complete."""

    STOP = "stop"
    LENGTH = "length"


class VersionSource(StrEnum):
    """How far a weight version of a token can be trusted."""

    LABEL = "label"  # the chunk's label when it was built: provisional
    SPAN = "span"  # the server's own per-token spans
    GIVEN = "given"  # brought along by the caller (`Snapshot.from_prefix`)


STATE_MEANINGS: dict[RolloutState, str] = {
    RolloutState.PENDING: "known to the engine, nothing in flight; also while backing off",
    RolloutState.STREAMING: "a request is in flight; this attempt has shown no token yet",
    RolloutState.PARTIAL: "in flight, and this attempt has added tokens",
    RolloutState.ABORTING: "an abort was asked for; its outcome is not known yet",
    RolloutState.ABORTED: "at rest: over without finishing; the prefix is kept and can be restored",
    RolloutState.COMPLETED: "final: the server finished it",
    RolloutState.FAILED: "final: it cannot be served; the prefix is kept",
    RolloutState.DISCARDED: "final: the caller gave it up, and says why",
}

TRIGGER_MEANINGS: dict[Trigger, str] = {
    Trigger.DISPATCH: "the engine is about to send; from here on the server may hold it",
    Trigger.OBSERVE: "tokens arrived",
    Trigger.FINISH: "terminal chunk stop or length, or nothing left to generate",
    Trigger.ABORT: "the caller or the engine asks for an end",
    Trigger.CONFIRM: "the server ended it after we asked",
    Trigger.PREEMPT: "the server ended it unasked",
    Trigger.LOSE: "the stream ended without a terminal chunk, or never began",
    Trigger.EXPIRE: "the abort deadline passed without an answer",
    Trigger.REJECT: "refused by the server, or malformed",
    Trigger.EXHAUST: "no attempts left",
    Trigger.RESTORE: "a new attempt starts from the snapshot",
    Trigger.DISCARD: "given up by the caller, with a reason",
}

GATE_STATE_MEANINGS: dict[GateState, str] = {
    GateState.OPEN: "rollouts may be dispatched",
    GateState.PAUSING: "no new dispatch; what is in flight is being brought to rest",
    GateState.PAUSED: "nothing of ours runs; weights may be changed",
    GateState.CLOSED: "final: the engine dispatches nothing any more",
}

GATE_TRIGGER_MEANINGS: dict[GateTrigger, str] = {
    GateTrigger.PAUSE: "a weight update begins",
    GateTrigger.SETTLE: "everything that had to stop has stopped",
    GateTrigger.RESUME: "dispatching goes on",
    GateTrigger.CLOSE: "the engine is closing",
}
