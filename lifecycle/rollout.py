"""One live rollout: an append-only record that events drive through the machine.

Everything here is synchronous. An event is validated first and committed second, so that a refused event leaves the
record as it was. Nothing here knows a clock, a log or a server: times are handed in, and every state change comes
back as a `Change` for the engine to log before it acts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from lifecycle.call import Call
from lifecycle.errors import ConfigurationError, StreamMalformed
from lifecycle.events import END_TRIGGERS, Anomaly, ChannelData, StreamEnd, TokenSlice, VersionSpan
from lifecycle.machine import RolloutCursor
from lifecycle.policy import DEFAULT_POLICY, Policy
from lifecycle.request import RolloutRequest, attempt_sampling_params, remaining_budget
from lifecycle.spans import label, settle
from lifecycle.states import (
    IN_FLIGHT_STATES,
    REST_STATES,
    Disposition,
    FinishReason,
    Outcome,
    Reason,
    RolloutState,
    Trigger,
)

if TYPE_CHECKING:
    from typing import Any

NO_SPANS: tuple[VersionSpan, ...] = ()

ABORT_OUTCOMES: dict[Trigger, Outcome] = {
    Trigger.CONFIRM: Outcome.CONFIRMED,
    Trigger.FINISH: Outcome.FINISHED,
    Trigger.LOSE: Outcome.LOST,
    Trigger.EXPIRE: Outcome.EXPIRED,
    Trigger.REJECT: Outcome.REJECTED,
}
"""What the trigger that leaves `aborting` says about the abort."""


class Attempt(msgspec.Struct, array_like=True):
    """One request that was sent for a rollout. Times are seconds since the epoch; `start` and `end` count tokens."""

    number: int
    rid: str
    start: int
    end: int
    dispatched_at: float
    first_token_at: float | None = None
    ended_at: float | None = None
    trigger: str | None = None
    reason: str | None = None
    outcome: str | None = None
    worker: str | None = None


class Channel(msgspec.Struct, array_like=True):
    """A per-token array beyond logprobs, opaque: one (start, data) piece per attempt that sent one."""

    pieces: list[tuple[int, bytes]]
    complete: bool


@dataclass(frozen=True, slots=True)
class Change:
    """One transition that was made, with everything a log line says of it."""

    trigger: Trigger
    source: RolloutState
    dest: RolloutState
    dwell_s: float
    tokens: int
    new_tokens: int
    dropped_tokens: int = 0
    reason: Reason | None = None
    detail: str | None = None
    outcome: Outcome | None = None


class Rollout(RolloutCursor):
    """One sample's life. `tokens` and `logprobs` grow together; `spans` says which weights sampled which of them."""

    __slots__ = (
        "_spans",
        "abort_reason",
        "attempt",
        "attempt_start",
        "attempts",
        "by_caller",
        "carries",
        "channels",
        "detail",
        "disposition",
        "entered_at",
        "epoch",
        "fenced",
        "finish_reason",
        "fruitless",
        "logprobs",
        "matched",
        "outcome",
        "policy",
        "preempts",
        "prompt_ids",
        "reason",
        "request",
        "rid",
        "seq",
        "submitted_at",
        "text_ends",
        "text_whole",
        "texts",
        "tokens",
    )

    def __init__(
        self,
        request: RolloutRequest,
        *,
        now: float = 0.0,
        policy: Policy = DEFAULT_POLICY,
        state: RolloutState = RolloutState.PENDING,
    ) -> None:
        super().__init__(state)
        self.request = request
        self.policy = policy
        self.prompt_ids: Sequence[int] | None = request.prompt_ids
        self.tokens = array("i")
        self.logprobs = array("d")
        self._spans: list[list[Any]] = []
        self.texts: list[str] = []
        self.text_whole = True
        self.text_ends = array("i")  # how many tokens were held when each piece of text came
        self.channels: dict[str, Channel] = {}
        self.attempts: list[Attempt] = []
        self.attempt = 0
        self.attempt_start = 0
        self.rid: str | None = None
        self.seq = 0
        self.epoch = 0
        self.fenced = False
        self.entered_at = now
        self.submitted_at = now
        self.disposition = Disposition.NONE
        self.finish_reason: FinishReason | None = None
        self.matched: int | str | None = None
        self.reason: Reason | None = None
        self.detail: str | None = None
        self.outcome: Outcome | None = None
        self.abort_reason: Reason | None = None
        self.by_caller = False
        self.fruitless = 0
        self.preempts = 0
        self.carries = 0

    @property
    def id(self) -> str:
        """The caller's id."""
        return self.request.id

    @property
    def at_rest(self) -> bool:
        """Nothing happens by itself any more."""
        return self._state in REST_STATES

    @property
    def in_flight(self) -> bool:
        """A request may be alive on a server."""
        return self._state in IN_FLIGHT_STATES

    @property
    def budget(self) -> int:
        """Tokens that may still be generated."""
        return remaining_budget(self.request, len(self.tokens))

    @property
    def nothing_left(self) -> FinishReason | None:
        """Why no further attempt is needed, None if one is.

        An abort may overtake the natural end (SGLang 0.5.23 reports `abort` for a step that sampled a stop token):
        what it left is complete, and a resume would generate beyond the end.
        """
        if self.budget == 0:
            return FinishReason.LENGTH
        params = self.request.sampling_params
        if (
            not self.tokens
            or params.get("ignore_eos")
            or len(self.tokens) < (params.get("min_new_tokens") or 0)
        ):
            return None
        stops = params.get("stop_token_ids") or ()
        last = self.tokens[-1]
        return FinishReason.STOP if last in stops or last in self.policy.eos_token_ids else None

    @property
    def attempt_tokens(self) -> int:
        """Tokens this attempt has added."""
        return len(self.tokens) - self.attempt_start

    @property
    def text(self) -> str | None:
        """The text pieces the server sent, joined; for convenience only.

        None where a piece is missing or not to be trusted: the text of an abort may be cut, repeated or garbled
        (SGLang 0.5.4 to 0.5.23), and a character split by a resume is lost. The tokens are the truth.
        """
        return "".join(self.texts) if self.texts and self.text_whole else None

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Weight versions of the tokens, in order; tokens of unknown version are in no span."""
        return tuple(VersionSpan(*span) for span in self._spans)

    @property
    def version(self) -> str | None:
        """The weight version of the newest token, None if unknown."""
        if not self._spans or self._spans[-1][2] != len(self.tokens):
            return None
        return str(self._spans[-1][0])

    def describe(self) -> str:
        """Name it in an error message."""
        return f"rollout {self.request.id!r}"

    # -- moving ------------------------------------------------------------------------------------------------

    def move(
        self,
        trigger: Trigger,
        now: float,
        *,
        reason: Reason | None = None,
        detail: str | None = None,
        new_tokens: int = 0,
    ) -> Change:
        """Fire `trigger` and account for it. Raises IllegalTransition and changes nothing if the table refuses."""
        source = self._state
        dest = self.fire(trigger)
        outcome = ABORT_OUTCOMES.get(trigger) if source is RolloutState.ABORTING else None
        dwell = max(0.0, now - self.entered_at)
        if dest is not source:
            self.entered_at = now
            self.reason, self.detail = reason, detail
            if outcome is not None or trigger in {Trigger.DISPATCH, Trigger.RESTORE}:
                self.outcome = outcome
        self.seq += 1
        return Change(trigger, source, dest, dwell, len(self.tokens), new_tokens, 0, reason, detail, outcome)

    def dispatch(self, rid: str, now: float, wall: float) -> Change:
        """Begin an attempt under the fresh request id `rid`."""
        change = self.move(Trigger.DISPATCH, now)
        self.attempt += 1
        self.attempt_start = len(self.tokens)
        self.rid = rid
        self.abort_reason = None
        self.by_caller = False
        self.attempts.append(Attempt(self.attempt, rid, self.attempt_start, self.attempt_start, wall))
        return change

    def call(self) -> Call:
        """The present attempt as a backend sends it: prompt ids plus kept tokens, and the remaining budget."""
        if self.rid is None or self.prompt_ids is None:
            raise ConfigurationError(f"{self.describe()} was not dispatched, or its prompt has no ids yet")
        return Call(
            rid=self.rid,
            rollout_id=self.id,
            attempt=self.attempt,
            input_ids=[*self.prompt_ids, *self.tokens],
            sampling_params=attempt_sampling_params(self.request, len(self.tokens)),
            extra=self.request.extra,
            routing_key=self.request.routing_key,
        )

    def observe(self, piece: TokenSlice, now: float, wall: float) -> Change | None:
        """Append new tokens; the Change of `streaming → partial` for the first ones, None for the rest.

        Raises StreamMalformed, with nothing changed, when the slice is empty, its lengths differ, or it exceeds
        the token budget that the attempt was given.
        """
        count = len(piece.tokens)
        if count == 0 or count != len(piece.logprobs):
            raise StreamMalformed(f"{count} tokens with {len(piece.logprobs)} logprobs")
        start = len(self.tokens)
        if start + count > self.request.max_new_tokens:
            raise StreamMalformed(f"{count} more tokens where the budget leaves {self.budget}")
        change = None
        if self._state is RolloutState.STREAMING:
            change = self.move(Trigger.OBSERVE, now, new_tokens=count)
        else:
            self.fire(Trigger.OBSERVE)
        self.tokens.extend(piece.tokens)
        self.logprobs.extend(piece.logprobs)
        if piece.version is not None:
            label(self._spans, piece.version, start, start + count)
        if piece.text is None:
            self.text_whole = False
        elif piece.text:
            self.texts.append(piece.text)
            self.text_ends.append(start + count)
        current = self.attempts[-1]
        current.end = start + count
        if current.first_token_at is None:
            current.first_token_at = wall
            self.fruitless = self.preempts = 0
        return None if change is None else Change(**{**_fields(change), "tokens": len(self.tokens)})

    def keep_channel(self, channel: ChannelData) -> None:
        """Keep an opaque per-token array; `complete` stays true only while every attempt's was."""
        held = self.channels.setdefault(channel.name, Channel([], complete=True))
        held.pieces.append((self.attempt_start + channel.start, channel.data))
        held.complete = held.complete and channel.complete

    def end(self, end: StreamEnd, now: float, wall: float) -> tuple[Change, Anomaly | None]:
        """Close the attempt with what the stream said last: the Change, and an anomaly if versions did not fit."""
        trigger = END_TRIGGERS[end.kind, self._state is RolloutState.ABORTING]
        anomaly = settle(self._spans, end.spans, self.attempt_start, self.attempt_tokens)
        asked = self._state is RolloutState.ABORTING and trigger in {Trigger.CONFIRM, Trigger.LOSE}
        reason = self.abort_reason if asked else end.reason
        change = self.move(trigger, now, reason=reason, detail=end.detail)
        if trigger is Trigger.FINISH:
            self.finish_reason, self.matched = end.finish_reason, end.matched
        elif self.tokens:
            self.text_whole = False
        self.close_attempt(change, wall, worker=str(end.meta["worker"]) if "worker" in end.meta else None)
        return change, anomaly

    def expire(self, reason: Reason, now: float, wall: float) -> Change:
        """Give up waiting for an abort to be answered."""
        change = self.move(Trigger.EXPIRE, now, reason=self.abort_reason or reason, detail=str(reason))
        self.text_whole = self.text_whole and not self.tokens
        self.close_attempt(change, wall)
        return change

    def close_attempt(self, change: Change, wall: float, worker: str | None = None) -> None:
        """Write down how the present attempt ended."""
        current = self.attempts[-1]
        current.ended_at = wall
        current.trigger = str(change.trigger)
        current.reason = None if change.reason is None else str(change.reason)
        current.outcome = None if change.outcome is None else str(change.outcome)
        current.worker = worker or current.worker

    def restore(self, now: float, reason: Reason | None, *, restart: bool = False) -> Change:
        """Make ready for another attempt; with `restart` the tokens are dropped and counted in the Change."""
        change = self.move(Trigger.RESTORE, now, reason=reason)
        dropped = self.drop() if restart else 0
        return Change(**{**_fields(change), "tokens": len(self.tokens), "dropped_tokens": dropped})

    def drop(self) -> int:
        """Drop all generated tokens and say how many; only `restore` and `rollout.restored` may do this."""
        dropped = len(self.tokens)
        del self.tokens[:], self.logprobs[:]
        self._spans.clear()
        self.texts.clear()
        self.text_whole = True
        del self.text_ends[:]
        self.channels.clear()
        self.attempt_start = 0
        return dropped

    # -- weight versions ---------------------------------------------------------------------------------------

    def set_spans(self, spans: Sequence[VersionSpan]) -> None:
        """Take over spans of a snapshot."""
        self._spans = [[span.version, span.start, span.end, span.source] for span in spans]


def _fields(change: Change) -> dict[str, Any]:
    return {name: getattr(change, name) for name in Change.__dataclass_fields__}


def same_logprob(one: float, other: float) -> bool:
    """Equal, or both NaN (the server gave null)."""
    return one == other or (math.isnan(one) and math.isnan(other))
