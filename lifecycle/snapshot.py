"""A rollout as a value: frozen and lossless; everything needed to go on in another process.

The bytes it is stored as are `lifecycle.codec`'s business.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from lifecycle.errors import ConfigurationError, SnapshotCorrupt
from lifecycle.events import VersionSpan
from lifecycle.policy import DEFAULT_POLICY, Policy
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Attempt, Channel, Rollout, same_logprob
from lifecycle.states import (
    FINAL_STATES,
    Disposition,
    FinishReason,
    Outcome,
    Reason,
    RolloutState,
    VersionSource,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything known of one rollout at one moment.

    `tokens` (int32) and `logprobs` (float64, NaN where the server gave null) have the same length and hold generated
    tokens only; `spans` are weight versions over them. `attempt` counts the requests sent so far. `process` names
    the process that took it. Never written to: a resumed rollout copies the arrays.
    """

    request: RolloutRequest
    state: RolloutState = RolloutState.PENDING
    prompt_ids: Sequence[int] | None = None
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    spans: tuple[VersionSpan, ...] = ()
    text: str | None = None
    attempt: int = 0
    attempts: tuple[Attempt, ...] = ()
    channels: Mapping[str, Channel] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    matched: int | str | None = None
    reason: Reason | None = None
    detail: str | None = None
    outcome: Outcome | None = None
    disposition: Disposition = Disposition.NONE
    fruitless: int = 0
    carries: int = 0
    seq: int = 0
    process: str | None = None

    def __post_init__(self) -> None:
        """Prompt ids that the request has itself need not be given."""
        if self.prompt_ids is None:
            object.__setattr__(self, "prompt_ids", self.request.prompt_ids)

    @property
    def id(self) -> str:
        """The caller's id of the rollout."""
        return self.request.id

    @property
    def final(self) -> bool:
        """Completed, failed or discarded."""
        return self.state in FINAL_STATES

    @property
    def weight_versions(self) -> list[dict[str, Any]]:
        """The spans as plain data, as `samples.jsonl` holds them."""
        return [
            {"version": span.version, "start": span.start, "end": span.end, "source": span.source}
            for span in self.spans
        ]

    @classmethod
    def from_prefix(
        cls,
        request: RolloutRequest,
        tokens: Sequence[int] = (),
        logprobs: Sequence[float | None] | None = None,
        versions: Sequence[VersionSpan] | str | None = None,
    ) -> Snapshot:
        """A resumable snapshot from a framework's own sample.

        `tokens` are the generated ids so far; `logprobs` as many floats (None: all unknown, NaN); `versions` spans
        over the tokens, or one label for all. Raises ConfigurationError when lengths differ or exceed the budget.
        """
        ids = array("i", tokens)
        values: array[float] = array("d", [float("nan")] * len(ids))
        if logprobs is not None:
            values = array("d", [float("nan") if value is None else value for value in logprobs])
        if len(values) != len(ids):
            raise ConfigurationError(f"request {request.id!r}: {len(ids)} tokens with {len(values)} logprobs")
        if len(ids) > request.max_new_tokens:
            raise ConfigurationError(
                f"request {request.id!r}: a prefix of {len(ids)} tokens exceeds max_new_tokens={request.max_new_tokens}"
            )
        return cls(
            request=request,
            state=RolloutState.ABORTED if len(ids) else RolloutState.PENDING,
            prompt_ids=request.prompt_ids,
            tokens=ids,
            logprobs=values,
            spans=_given_spans(versions, len(ids), request.id),
            reason=Reason.RESUMED if len(ids) else None,
        )

    def agrees_with(self, other: Snapshot) -> bool:
        """Two snapshots of one rollout agree when tokens and logprobs are equal up to the shorter one."""
        shorter = min(len(self.tokens), len(other.tokens))
        if self.tokens[:shorter] != other.tokens[:shorter]:
            return False
        if self.logprobs[:shorter] == other.logprobs[:shorter]:
            return True
        return all(map(same_logprob, self.logprobs[:shorter], other.logprobs[:shorter]))

    def loss_mask(self, current_version: str | None = None) -> list[int]:
        """1 for each token to train on; 0 for tokens not known to be of `current_version` (None: all 1)."""
        if current_version is None:
            return [1] * len(self.tokens)
        mask = [0] * len(self.tokens)
        for span in self.spans:
            if span.version == current_version:
                mask[span.start : span.end] = [1] * (span.end - span.start)
        return mask

    def extended(self, tail: Tail) -> Snapshot:
        """This snapshot with the tokens of a later `tail`. Raises SnapshotCorrupt where the two contradict."""
        overlap = len(self.tokens) - tail.start
        if overlap < 0:
            raise SnapshotCorrupt(
                self.id, f"a tail starts at token {tail.start}, only {len(self.tokens)} are held"
            )
        if overlap >= len(tail.tokens):
            return self
        if self.tokens[tail.start :] != tail.tokens[:overlap]:
            raise SnapshotCorrupt(self.id, f"a tail at token {tail.start} contradicts the tokens held")
        attempt = max(self.attempt, tail.attempt)
        return replace(
            self,
            tokens=self.tokens + tail.tokens[overlap:],
            logprobs=self.logprobs + tail.logprobs[overlap:],
            spans=tail.spans,
            text=self._text_with(tail),
            attempt=attempt,
            state=tail.state,
        )

    def _text_with(self, tail: Tail) -> str | None:
        if tail.text is None:
            return self.text
        held = self.text or ""
        if len(held) < tail.text_start:
            raise SnapshotCorrupt(
                self.id, f"text of a tail starts at character {tail.text_start}, only {len(held)} are held"
            )
        return held[: tail.text_start] + tail.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What a checkpoint adds to the stored snapshot of a rollout in flight: tokens from `start` on.

    `spans` are those of the whole rollout: they are short, and a label may be replaced by a span after the fact.
    `text` is what came with these tokens only, from character `text_start` of the whole text; None: no text.
    """

    id: str
    attempt: int
    start: int
    tokens: array[int]
    logprobs: array[float]
    spans: tuple[VersionSpan, ...] = ()
    text: str | None = None
    text_start: int = 0
    state: RolloutState = RolloutState.PARTIAL


def take(rollout: Rollout, process: str | None = None) -> Snapshot:
    """A snapshot of a live rollout; the arrays are copied, later tokens do not show."""
    return Snapshot(
        request=rollout.request,
        state=rollout.state,
        prompt_ids=rollout.prompt_ids,
        tokens=rollout.tokens[:],
        logprobs=rollout.logprobs[:],
        spans=rollout.spans,
        text=rollout.text,
        attempt=rollout.attempt,
        attempts=tuple(msgspec.structs.replace(attempt) for attempt in rollout.attempts),
        channels=dict(rollout.channels),
        finish_reason=rollout.finish_reason,
        matched=rollout.matched,
        reason=rollout.reason,
        detail=rollout.detail,
        outcome=rollout.outcome,
        disposition=rollout.disposition,
        fruitless=rollout.fruitless,
        carries=rollout.carries,
        seq=rollout.seq,
        process=process,
    )


def take_tail(rollout: Rollout, start: int) -> Tail:
    """The tokens of a live rollout from `start` on, with the text that came after them."""
    piece = bisect_right(rollout.text_ends, start)
    return Tail(
        id=rollout.id,
        attempt=rollout.attempt,
        start=start,
        tokens=rollout.tokens[start:],
        logprobs=rollout.logprobs[start:],
        spans=rollout.spans,
        text="".join(rollout.texts[piece:]) if rollout.texts else None,
        text_start=sum(map(len, rollout.texts[:piece])),
        state=rollout.state,
    )


def revive(snapshot: Snapshot, *, now: float, policy: Policy = DEFAULT_POLICY) -> Rollout:
    """A live rollout that goes on from `snapshot`, in the snapshot's state.

    A snapshot taken in flight comes back as `aborted`: its request belongs to another process, or to none.
    """
    in_flight = not (snapshot.final or snapshot.state in {RolloutState.ABORTED, RolloutState.PENDING})
    state = RolloutState.ABORTED if in_flight else snapshot.state
    rollout = Rollout(snapshot.request, now=now, policy=policy, state=state)
    rollout.prompt_ids = (
        snapshot.prompt_ids if snapshot.prompt_ids is not None else snapshot.request.prompt_ids
    )
    rollout.tokens = snapshot.tokens[:]
    rollout.logprobs = snapshot.logprobs[:]
    rollout.set_spans(snapshot.spans)
    rollout.texts = [snapshot.text] if snapshot.text else []
    rollout.text_whole = not snapshot.tokens or (snapshot.text is not None and not in_flight)
    rollout.text_ends = array("i", [len(rollout.tokens)] * len(rollout.texts))
    rollout.attempt = snapshot.attempt
    rollout.attempt_start = len(rollout.tokens)
    rollout.attempts = [msgspec.structs.replace(attempt) for attempt in snapshot.attempts]
    rollout.channels = {name: Channel(list(c.pieces), c.complete) for name, c in snapshot.channels.items()}
    rollout.finish_reason = snapshot.finish_reason
    rollout.matched = snapshot.matched
    rollout.reason = Reason.CRASH if in_flight else snapshot.reason
    rollout.detail = snapshot.detail
    rollout.outcome = snapshot.outcome
    rollout.disposition = snapshot.disposition
    rollout.fruitless = snapshot.fruitless
    rollout.carries = snapshot.carries
    return rollout


def _given_spans(
    versions: Sequence[VersionSpan] | str | None, tokens: int, rollout_id: str
) -> tuple[VersionSpan, ...]:
    if versions is None or tokens == 0:
        return ()
    if isinstance(versions, str):
        return (VersionSpan(versions, 0, tokens, VersionSource.GIVEN),)
    position = 0
    for span in versions:
        if not position <= span.start <= span.end <= tokens:
            raise ConfigurationError(
                f"request {rollout_id!r}: version span [{span.start}, {span.end}) does not fit {tokens} tokens in order"
            )
        position = span.end
    return tuple(VersionSpan(span.version, span.start, span.end, VersionSource.GIVEN) for span in versions)
