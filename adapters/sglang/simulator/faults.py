"""What can go wrong, as data: a table of scripted faults, each for one request or for many by a seeded chance.

In a program: ``Fault(FaultKind.CUT, after=20, p=0.1)``. On the command line: ``--fault cut:after=20,p=0.1``.
Nothing here is random: whether request number *i* is hit follows from the seed, the fault's place in the list and *i*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from adapters.sglang.simulator.model import mix


class FaultKind(StrEnum):
    """The faults, by the name that ``--fault`` takes."""

    CUT = "cut"
    """The connection breaks in the middle of the chunk after ``after`` tokens."""
    STALL = "stall"
    """After ``after`` tokens nothing more comes for ``steps`` steps (default: ever). ``deaf``: aborts do nothing either."""
    REFUSE = "refuse"
    """An HTTP error (``status``, default 503) with a JSON body instead of a stream."""
    ERROR_CHUNK = "error-chunk"
    """``{"error": …}`` with ``status`` (default 400) inside a 200 stream, after ``after`` tokens, then ``[DONE]``."""
    ABORT = "abort"
    """A terminal abort nobody asked for, after ``after`` tokens, with ``status`` and ``message`` where given."""
    LOST_TERMINAL = "lost-terminal"
    """The stream ends after ``after`` tokens (0: where it would have finished) without a terminal chunk;
    ``done=0`` leaves out ``[DONE]`` too."""
    WRONG_LENGTH = "wrong-length"
    """``completion_tokens`` and the logprob count of one chunk are off by ``delta`` (default 1)."""
    MALFORMED = "malformed"
    """One chunk is cut-off JSON in a complete SSE event; the stream goes on after it."""
    NULL_LOGPROB = "null-logprob"
    """The logprob of the token after ``after`` is null, as SGLang writes NaN."""
    MERGE = "merge"
    """Chunks after ``after`` tokens are held for ``steps`` steps (default 3) and arrive as one, once."""
    RETRACT = "retract"
    """The request goes back to the queue after ``after`` tokens, as under memory pressure, and comes again."""
    DEATH = "death"
    """The whole server dies when this request holds ``after`` tokens: every connection breaks, no more answers.
    ``restart`` (seconds, server only) brings an empty one back on the same port."""
    SLOW_HEADERS = "slow-headers"
    """The response headers come only after ``steps`` steps (default 20); the request runs meanwhile."""
    OVERTAKEN = "overtaken"
    """The request arrives only after an abort of it has: that abort is dropped, with a 200. Without one, after
    ``steps`` steps (default 20)."""
    CONTROL_REFUSED = "control-refused"
    """A control call (``path``, default ``abort_request``) answers ``status`` (default 500) and does nothing."""


_STATUS = {FaultKind.REFUSE: 503, FaultKind.ERROR_CHUNK: 400, FaultKind.CONTROL_REFUSED: 500}
_STEPS = {FaultKind.MERGE: 3, FaultKind.SLOW_HEADERS: 20, FaultKind.OVERTAKEN: 20}


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the fault table: what happens, when, and to which requests."""

    kind: FaultKind
    p: float = 1.0
    """Chance for each request (or control call) that it is hit at all."""
    after: int = 0
    """How many tokens of this attempt come first."""
    times: int | None = None
    """How often at most, over the life of the server; None: without limit."""
    nth: int | None = None
    """Only the n-th request that this server gets, counting from 0."""
    rid: str | None = None
    """Only the request with this rid."""
    steps: int | None = None
    status: int | None = None
    message: str | None = None
    delta: int = 1
    done: bool = True
    deaf: bool = False
    restart: float | None = None
    path: str = "abort_request"

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(f"fault {self.kind}: p must lie between 0 and 1, got {self.p}")
        if self.after < 0:
            raise ValueError(f"fault {self.kind}: after must not be negative, got {self.after}")
        if self.status is None and self.kind in _STATUS:
            object.__setattr__(self, "status", _STATUS[self.kind])
        if self.steps is None and self.kind in _STEPS:
            object.__setattr__(self, "steps", _STEPS[self.kind])


def _flag(word: str) -> bool:
    if word.lower() in ("1", "true", "yes"):
        return True
    if word.lower() in ("0", "false", "no"):
        return False
    raise ValueError(f"{word!r} is not 0 or 1")


_CONVERT: dict[str, Any] = {
    "p": float,
    "after": int,
    "times": int,
    "nth": int,
    "rid": str,
    "steps": int,
    "status": int,
    "message": str,
    "delta": int,
    "done": _flag,
    "deaf": _flag,
    "restart": float,
    "path": lambda word: word.strip("/"),
}
assert set(_CONVERT) == {field.name for field in dataclasses.fields(Fault)} - {"kind"}


def parse_fault(text: str) -> Fault:
    """Read ``NAME[:key=value,…]``, for example ``cut:after=20,p=0.1``. Raises ValueError, saying what would be right."""
    name, _, rest = text.partition(":")
    try:
        kind = FaultKind(name.strip())
    except ValueError:
        raise ValueError(f"unknown fault {name.strip()!r}; known are {', '.join(FaultKind)}") from None
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, word = item.partition("=")
        key = key.strip()
        if not equals or key not in _CONVERT:
            raise ValueError(f"fault {kind}: {item!r} is not key=value with a key of {', '.join(_CONVERT)}")
        try:
            values[key] = _CONVERT[key](word.strip())
        except ValueError as error:
            raise ValueError(f"fault {kind}: {key}={word.strip()} does not fit: {error}") from None
    return Fault(kind, **values)


class FaultPlan:
    """The faults of one server, and how often each has struck."""

    def __init__(self, faults: Iterable[Fault] = (), seed: int = 0) -> None:
        self._seed = seed
        self._faults: list[Fault] = list(faults)
        self._struck: list[int] = [0] * len(self._faults)
        self._control_calls = 0

    def add(self, fault: Fault) -> None:
        """One more row."""
        self._faults.append(fault)
        self._struck.append(0)

    def clear(self) -> None:
        """No more faults for requests that are still to come; those already hit keep theirs."""
        self._faults.clear()
        self._struck.clear()

    def for_request(self, number: int, rid: str) -> list[Fault]:
        """The faults that will strike request ``number`` of this server, in the order of the table."""
        return [
            fault
            for index, fault in enumerate(self._faults)
            if fault.kind is not FaultKind.CONTROL_REFUSED
            and fault.rid in (None, rid)
            and fault.nth in (None, number)
            and self._strikes(index, number)
        ]

    def for_control(self, path: str) -> Fault | None:
        """The fault that refuses this control call, if any; ``path`` without the leading slash."""
        self._control_calls += 1
        for index, fault in enumerate(self._faults):
            matches = fault.kind is FaultKind.CONTROL_REFUSED and fault.path == path
            if matches and self._strikes(index, self._control_calls):
                return fault
        return None

    def _strikes(self, index: int, number: int) -> bool:
        fault = self._faults[index]
        if fault.times is not None and self._struck[index] >= fault.times:
            return False
        if fault.p < 1.0 and self._chance(index, number) >= fault.p:
            return False
        self._struck[index] += 1
        return True

    def _chance(self, index: int, number: int) -> float:
        return mix(mix(self._seed + 1) ^ (index << 40) ^ number) / 2**64
