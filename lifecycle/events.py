"""What a backend's stream can say, and which trigger each ending is.

A backend yields batches of these, one batch per socket read, and exactly one `StreamEnd` as the last event of all.
Slices travel, not single tokens: one `TokenSlice` holds everything one read brought.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from lifecycle.states import FinishReason, Reason, Trigger


class EndKind(StrEnum):
    """How a stream ended, in the terms of the server, before anybody asks what that means for the rollout."""

    FINISHED = "finished"  # terminal chunk stop or length
    ENDED = "ended"  # terminal abort without a status code, or with 5xx
    REFUSED = "refused"  # terminal abort with 4xx
    LOST = "lost"  # no terminal chunk, or no stream at all
    REJECTED = "rejected"  # error answer, or something that cannot be true


END_TRIGGERS: dict[tuple[EndKind, bool], Trigger] = {
    # (how it ended, was an abort asked for?) → trigger
    (EndKind.FINISHED, False): Trigger.FINISH,
    (EndKind.FINISHED, True): Trigger.FINISH,
    (EndKind.ENDED, False): Trigger.PREEMPT,
    (EndKind.ENDED, True): Trigger.CONFIRM,
    (EndKind.REFUSED, False): Trigger.REJECT,
    (EndKind.REFUSED, True): Trigger.CONFIRM,
    (EndKind.LOST, False): Trigger.LOSE,
    (EndKind.LOST, True): Trigger.LOSE,
    (EndKind.REJECTED, False): Trigger.REJECT,
    (EndKind.REJECTED, True): Trigger.REJECT,
}


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `[start, end)` were sampled from the weights labelled `version`.

    In events, positions count from the start of the attempt; in a rollout, from its first generated token.
    """

    version: str
    start: int
    end: int
    source: str = "span"


class TokenSlice(Struct, frozen=True, gc=False):
    """New tokens of this attempt, already checked against what the attempt had shown.

    `tokens` and `logprobs` have the same length (at least 1); a null logprob is NaN. `version` is the label of the
    chunk, None where the server gave none. `text` is for convenience and never used to resume.
    One is made per read of a stream, so it is a msgspec Struct: a tenth of the cost of a frozen dataclass.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    version: str | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The server has taken the request; `worker` is who serves it, None where a router hides it."""

    worker: str | None = None


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Something worth a log line that changes nothing: a late event, a length that had to be interpreted."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class ChannelData:
    """A per-token channel beyond logprobs (routed experts, top-p sets) as the server sent it: opaque bytes.

    `start` is the position of the first row, counted from the start of the attempt's output; `complete` says
    whether the server claims that every token of the attempt is covered.
    """

    name: str
    data: bytes
    start: int
    complete: bool


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The last event of every stream.

    `status` is an HTTP or abort status code where there was one; `detail` the server's own words, cut short;
    `spans` the server's per-token versions of this attempt, `covered` how many tokens they speak of.
    """

    kind: EndKind
    reason: Reason
    detail: str | None = None
    finish_reason: FinishReason | None = None
    matched: int | str | None = None
    status: int | None = None
    spans: tuple[VersionSpan, ...] = ()
    meta: Mapping[str, int | float | str] = field(default_factory=dict)


StreamEvent = TokenSlice | Accepted | Anomaly | ChannelData | StreamEnd


def token_slice(pairs: Sequence[tuple[float | None, int]], version: str | None = None) -> TokenSlice:
    """Build a `TokenSlice` from (logprob, token) pairs, None becoming NaN. For tests and simple backends."""
    logprobs = array("d", [float("nan") if logprob is None else logprob for logprob, _ in pairs])
    return TokenSlice(array("i", [token for _, token in pairs]), logprobs, version)
