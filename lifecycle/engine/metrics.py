"""A running engine in plain numbers, per training step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from lifecycle.engine.reports import EngineStats
from lifecycle.ledger import LedgerView
from lifecycle.states import GateState

ENDED: Final = ("delivered", "filtered", "stale", "failed", "discarded")


class Measured(Protocol):
    """What can be measured: a `LifecycleEngine`, or an `EngineThread`."""

    def stats(self) -> EngineStats:
        """Numbers of this moment."""
        ...

    def ledger(self) -> LedgerView:
        """Where every rollout is and what became of every token."""
        ...


def gauges(stats: EngineStats, ledger: LedgerView) -> dict[str, float]:
    """What is so at this moment: rollouts by place, requests in flight, the gate, the store's backlog."""
    held = {place: n for place, n in ledger.rollouts.items() if place not in ENDED}
    return {
        "gate_open": float(stats.gate == GateState.OPEN),
        "requests_in_flight": stats.in_flight,
        "ready": stats.ready,
        "backing_off": stats.backing_off,
        "aborts_unresolved": stats.aborts_unresolved,
        "outage_s": stats.outage_s,
        "store_backlog": stats.store.get("backlog_operations", 0),
        **{f"rollouts/{place}": n for place, n in held.items()},
        "tokens/held": sum(ledger.tokens[place] for place in held),
    }


def counters(stats: EngineStats, ledger: LedgerView) -> dict[str, float]:
    """What only grows: rollouts and tokens by how they ended, attempts, aborts by outcome."""
    return {
        "submitted": ledger.submitted,
        "attempts": stats.attempts,
        **{f"rollouts/{place}": ledger.rollouts[place] for place in ENDED},
        "tokens/observed": ledger.observed,
        "tokens/brought": ledger.brought,
        "tokens/delivered": ledger.tokens["delivered"],
        "tokens/kept_by_resuming": ledger.saved_tokens,
        "tokens/wasted": sum(ledger.wasted.values()),
        "tokens/dropped": sum(ledger.dropped.values()),
        **{f"aborts/{outcome}": n for outcome, n in stats.aborts.items()},
    }


class StepMetrics:
    """Plain numbers per step: gauges as they are, counters as what they grew by since the last `take()`.

    `clock` gives seconds and is used for `tokens_per_s`. The keys carry `prefix`, as trackers group by it.
    """

    def __init__(
        self, engine: Measured, *, prefix: str = "rollout/", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._prefix = prefix
        self._clock = clock
        self._before = counters(engine.stats(), engine.ledger())
        self._taken_at = clock()

    def take(self) -> dict[str, float]:
        """The numbers of the step that ends here. `tokens_per_s` is over the time since the last call."""
        stats, ledger, now = self._engine.stats(), self._engine.ledger(), self._clock()
        total = counters(stats, ledger)
        grown = {name: value - self._before.get(name, 0) for name, value in total.items()}
        elapsed = now - self._taken_at
        self._before, self._taken_at = total, now
        numbers = gauges(stats, ledger) | grown
        numbers["step_s"] = elapsed
        numbers["tokens_per_s"] = grown["tokens/observed"] / elapsed if elapsed > 0 else 0.0
        return {self._prefix + name: value for name, value in numbers.items()}
