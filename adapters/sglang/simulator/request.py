"""One request inside the simulated server, from the socket to the last token.

The real server has two processes, and two counts follow from that; both are kept here. ``tokens`` is what the
scheduler has made. ``emitted`` of them have reached the process that talks to clients (``stream_interval`` and
stop strings hold some back), ``shown`` of them have been put on the wire. An abort in the queue can only report
what was emitted, and a slow reader finds everything since ``shown`` in one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from adapters.sglang.simulator.faults import Fault, FaultKind
from adapters.sglang.simulator.schema import GenerateBody, SamplingParams
from adapters.sglang.simulator.text import TextStream, decode


class Phase(StrEnum):
    """Where a request is."""

    ARRIVING = "arriving"
    """On its way: the server does not know the rid yet."""
    BLOCKED = "blocked"
    """Known, but held before the scheduler because generation is paused."""
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Mark(Enum):
    """How a response body ends: END in good order, CUT with the connection broken."""

    END = "end"
    CUT = "cut"


class Ending(StrEnum):
    """What the last part of a stream looks like."""

    FINISH = "finish"
    """A terminal chunk in the usual shape, then ``[DONE]``."""
    QUEUE_ABORT = "queue-abort"
    """The other abort shape: what the client-facing process knows by itself (issue #40901)."""
    ERROR = "error"
    """An ``{"error": …}`` chunk, then ``[DONE]``."""
    LOST = "lost"
    """No terminal chunk; with or without ``[DONE]``."""
    CUT = "cut"
    """The connection breaks, in the middle of a chunk where there is one."""
    REFUSED = "refused"
    """Not a stream at all: an HTTP status and a JSON body."""


@dataclass(slots=True, eq=False)
class Request:
    """The live state of one request; also the handle by which its response is polled."""

    rid: str
    number: int
    """The how manieth request of this server, from 0."""
    body: GenerateBody
    faults: list[Fault]
    started: float
    """Clock of the brain at arrival, seconds."""
    prompt: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=SamplingParams)
    budget: int = 0
    prompt_tokens: int = 0
    prompt_pairs: list[tuple[float | None, int, str | None]] = field(default_factory=list)
    """Logprobs of the prompt from ``logprob_start_len`` on; the first is null."""
    phase: Phase = Phase.ARRIVING

    # What the scheduler knows.
    tokens: list[int] = field(default_factory=list)
    pairs: list[tuple[float | None, int, str | None]] = field(default_factory=list)
    """``[logprob, token id, text or null]`` of each token."""
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    """(version, index of the first token it made), ascending."""
    state: int = 0
    """Rolling hash of prompt + tokens."""
    cached_tokens: int = 0
    retractions: int = 0
    abort_reason: dict[str, Any] | None = None
    """Set while running: the request ends with this after one more token."""
    stalled_until: int | None = None
    """Step from which it moves again; negative: never."""
    deaf: bool = False

    # What the client-facing process knows.
    emitted: int = 0
    text: TextStream = field(default_factory=TextStream)
    label: str = "default"
    """The weight-version label of the last chunk it built."""
    labels: list[str] = field(default_factory=list)
    """Labels still to be used, one per chunk: the lag."""
    finish_reason: dict[str, Any] | None = None
    abort_sent: bool = False
    ending: Ending | None = None
    failure: dict[str, Any] = field(default_factory=dict)
    """The error object, or the status and body of a refusal."""

    # What the client has seen.
    shown: int = 0
    shown_text: int = 0
    opened: bool = False
    """A first chunk was sent."""
    closed: bool = False
    """The response is complete, or nobody reads it any longer."""
    fresh: bool = False
    """There is something to poll."""
    headers_at: int = 0
    """Step from which the response headers are visible."""
    held_until: int = 0
    """Step until which chunks are held back."""
    cut_at: int | None = None
    off_by: int = 0
    broken_json: bool = False
    done_marker: bool = True
    on_ready: Callable[[], None] | None = None
    """Called whenever there may be something new to poll; for servers."""

    @property
    def stream(self) -> bool:
        """Whether the client asked for a stream."""
        return bool(self.body.stream)

    @property
    def live(self) -> bool:
        """Whether the server still has work or memory for it."""
        return self.phase is not Phase.ENDED

    @property
    def logprobs(self) -> list[float | None]:
        """The logprob of each token."""
        return [pair[0] for pair in self.pairs]

    def touch(self) -> None:
        """Something new can be polled: tell whoever waits."""
        self.fresh = True
        if self.on_ready is not None:
            self.on_ready()

    def take_faults(self, *kinds: FaultKind) -> list[Fault]:
        """The faults of these kinds whose time has come, each at most once per request."""
        due = [fault for fault in self.faults if fault.kind in kinds and len(self.tokens) >= fault.after]
        for fault in due:
            self.faults.remove(fault)
        return due

    def spans(self, count: int, current: str) -> list[dict[str, Any]]:
        """``weight_versions``: half-open ranges over the first ``count`` output tokens."""
        starts = [(version, start) for version, start in self.version_starts if start < count]
        if not starts:
            return [{"version": current, "start": 0, "end": count}]
        ends = [start for _, start in starts[1:]] + [count]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(starts, ends, strict=True)
        ]

    def tail(self) -> str:
        """The end of the output in which a stop string must lie, decoded alone, as SGLang looks for it."""
        longest = max((len(stop.encode()) for stop in self.params.stops), default=0)
        return decode(self.tokens[-(longest + 1) :]) if longest else ""

    def matched_stop(self) -> str | None:
        """The first stop string that the output ends in (or nearly so)."""
        stops = self.params.stops
        if not stops:
            return None
        tail = self.tail()
        return next((stop for stop in stops if stop in tail), None)

    def may_be_stopping(self) -> bool:
        """Whether the output ends in the beginning of a stop string: chunks are then withheld."""
        if not self.params.stops:
            return False
        tail = self.tail()
        return any(
            tail.endswith(stop[:length])
            for stop in self.params.stops
            for length in range(1, min(len(stop), len(tail)) + 1)
        )
