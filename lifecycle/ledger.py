"""Where every rollout is and what became of every token: counted as it happens, checked against what is there.

Rollouts: each one submitted is in exactly one place. Tokens: each one observed, or brought along in a snapshot, is
held by a live rollout, delivered, carried, wasted (with a reason), or was dropped (with a reason).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from lifecycle.rollout import Rollout
from lifecycle.states import IN_FLIGHT_STATES, Disposition, RolloutState

PLACES = (
    "pending",
    "in_flight",
    "resumable",
    "completed",
    "delivered",
    "filtered",
    "stale",
    "failed",
    "discarded",
)
WASTED_PLACES = ("filtered", "stale", "failed", "discarded")


def place_of(rollout: Rollout) -> str:
    """The one place a rollout is in, from its state and disposition."""
    state = rollout.state
    if state is RolloutState.PENDING:
        return "pending"
    if state in IN_FLIGHT_STATES:
        return "in_flight"
    if state is RolloutState.ABORTED:
        return "resumable"
    if state is RolloutState.COMPLETED:
        ended = rollout.disposition in {Disposition.DELIVERED, Disposition.FILTERED, Disposition.STALE}
        return str(rollout.disposition) if ended else "completed"
    return str(state)


@dataclass(frozen=True, slots=True)
class LedgerView:
    """One look at the books.

    `rollouts` and `tokens` are by place; `dropped` and `wasted` are tokens by reason; `saved_tokens` were kept over
    a resume instead of being generated again. `balanced` says that both sums come out even; `difference` by how
    many tokens they do not.
    """

    submitted: int
    released: int
    rollouts: dict[str, int]
    tokens: dict[str, int]
    observed: int
    brought: int
    dropped: dict[str, int]
    wasted: dict[str, int]
    saved_tokens: int
    difference: int
    balanced: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a log line."""
        return asdict(self)


class Ledger:
    """The books of one engine. Live rollouts are looked at, retired ones are remembered as sums."""

    def __init__(self) -> None:
        self.submitted = 0
        self.released = 0
        self.released_tokens = 0
        self.observed = 0
        self.brought = 0
        self.saved_tokens = 0
        self.dropped: Counter[str] = Counter()
        self._rollouts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._wasted: Counter[str] = Counter()

    def entered(self, rollout: Rollout) -> None:
        """A rollout came into this engine, with the tokens it brought."""
        self.submitted += 1
        self.brought += len(rollout.tokens)

    def retire(self, rollout: Rollout) -> None:
        """A final rollout, its disposition known, leaves the registry; it stays in the sums."""
        place, tokens = place_of(rollout), len(rollout.tokens)
        self._rollouts[place] += 1
        self._tokens[place] += tokens
        if place in WASTED_PLACES:
            reason = str(rollout.reason) if rollout.state is not RolloutState.COMPLETED else place
            self._wasted[reason] += tokens

    def release(self, rollout: Rollout) -> None:
        """A rollout leaves this engine unfinished: another owner has it, or the caller took it away."""
        self.released += 1
        self.released_tokens += len(rollout.tokens)

    def view(self, live: Iterable[Rollout]) -> LedgerView:
        """Close the books over the retired sums and the `live` rollouts."""
        rollouts, tokens = Counter(self._rollouts), Counter(self._tokens)
        for rollout in live:
            place = place_of(rollout)
            rollouts[place] += 1
            tokens[place] += len(rollout.tokens)
        held = sum(tokens.values()) + self.released_tokens
        difference = self.observed + self.brought - held - self.dropped.total()
        return LedgerView(
            submitted=self.submitted,
            released=self.released,
            rollouts={place: rollouts[place] for place in PLACES},
            tokens={place: tokens[place] for place in PLACES},
            observed=self.observed,
            brought=self.brought,
            dropped=dict(self.dropped),
            wasted={reason: count for reason, count in self._wasted.items() if count},
            saved_tokens=self.saved_tokens,
            difference=difference,
            balanced=difference == 0 and sum(rollouts.values()) + self.released == self.submitted,
        )
