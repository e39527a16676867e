"""Reading the engine's numbers, and a caller's words."""

from __future__ import annotations

from collections import Counter

from lifecycle.engine.aborts import Aborts
from lifecycle.engine.core import Core
from lifecycle.engine.reports import EngineStats
from lifecycle.log.journal import Journal
from lifecycle.states import Reason


def look(core: Core, aborts: Aborts, journal: Journal) -> EngineStats:
    """The numbers of this moment."""
    waiting = core.queue.waiting
    outage = core.outage.began
    return EngineStats(
        gate=core.gate.state,
        states=dict(Counter(str(rollout.state) for rollout in core.rollouts.values())),
        ready=len(core.queue) - waiting,
        backing_off=waiting,
        in_flight=len(core.flights),
        max_in_flight=core.settings.max_in_flight,
        observed_tokens=core.recorder.ledger.observed,
        attempts=core.attempts,
        aborts=dict(core.recorder.outcomes),
        aborts_unresolved=len(aborts.pending),
        outage_s=0.0 if outage is None else core.clock.monotonic() - outage,
        current_version=core.recorder.versions.current,
        log_lines=journal.emitted,
        store=core.recorder.storage.stats(),
    )


def as_reason(reason: Reason | str) -> tuple[Reason, str | None]:
    """The enum value that words stand for (`over-sampled` is `over_sampled`); other words are `requested`, and kept."""
    try:
        return Reason(str(reason).replace("-", "_").replace(" ", "_")), None
    except ValueError:
        return Reason.REQUESTED, str(reason)
