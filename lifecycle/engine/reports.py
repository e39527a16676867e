"""What the engine hands back: plain frozen values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lifecycle.backend import AbortReceipt
from lifecycle.errors import SnapshotError
from lifecycle.states import Outcome

if TYPE_CHECKING:
    from lifecycle.engine.handle import RolloutHandle


@dataclass(frozen=True, slots=True)
class AbortReport:
    """One outcome per rollout that was asked to end, what the workers answered, and what is held of each.

    `kept` are the ids with tokens to go on from, `empty` those without. `elapsed_s` counts from the call to the
    last rest. `expired` outcomes may have left a request alive on a server. `receipts` are those that were in when the
    last rollout came to rest: a stream may end before its abort is answered.
    """

    outcomes: Mapping[str, Outcome]
    kept: tuple[str, ...]
    empty: tuple[str, ...]
    receipts: tuple[AbortReceipt, ...]
    elapsed_s: float

    @property
    def counts(self) -> dict[str, int]:
        """How many rollouts ended with each outcome."""
        return dict(Counter(map(str, self.outcomes.values())))

    @property
    def leaks(self) -> tuple[str, ...]:
        """Ids whose end no server confirmed."""
        return tuple(name for name, outcome in self.outcomes.items() if outcome is Outcome.EXPIRED)


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What came back from the store: handles of the rollouts, and what could not be read."""

    handles: tuple[RolloutHandle, ...]
    unreadable: tuple[SnapshotError, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One look at a running engine. Times in seconds."""

    gate: str
    states: dict[str, int]
    ready: int
    backing_off: int
    in_flight: int
    max_in_flight: int
    observed_tokens: int
    attempts: int
    aborts: dict[str, int]
    aborts_unresolved: int
    outage_s: float
    current_version: str | None
    log_lines: int
    store: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)
