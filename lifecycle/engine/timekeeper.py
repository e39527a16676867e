"""The one task that watches the time: back-offs, abort deadlines, stalls, checkpoints, flushes."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from lifecycle.engine.aborts import Aborts, PendingAbort
from lifecycle.engine.core import Core
from lifecycle.engine.delivery import hear_store
from lifecycle.states import GateState, Reason, RolloutState


class Timekeeper:
    """Sleeps until something is due or somebody calls `wake`; one timer for everything, none per stream."""

    def __init__(self, core: Core, aborts: Aborts, start_send: Callable[[list[PendingAbort]], None]) -> None:
        self._core = core
        self._aborts = aborts
        self._start_send = start_send
        self._wake = anyio.Event()
        self._sweep_at = 0.0

    def wake(self) -> None:
        """Look again now. Any number of calls before the task runs cost one look."""
        self._wake.set()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            delay = self.tick()
            with anyio.move_on_after(delay):
                await self._wake.wait()

    def tick(self) -> float:
        """Do what is due; returns the seconds until the next look."""
        self._wake = anyio.Event()
        core, now = self._core, self._core.clock.monotonic()
        if now >= self._sweep_at:
            self._sweep(now)
            self._sweep_at = now + core.settings.flush_seconds
        batch = self._aborts.tick(now)
        if batch:
            self._start_send(batch)
        core.pump()
        return self._next_look(now)

    def _next_look(self, now: float) -> float:
        core = self._core
        times = [self._sweep_at]
        if (due := core.next_dispatch()) is not None:
            times.append(due)
        if (due := self._aborts.next_due()) is not None:
            times.append(due)
        return max(0.0, min(times) - now)

    def _sweep(self, now: float) -> None:
        core = self._core
        if core.gate.state is GateState.OPEN:
            self._stalled(now)
        for flight in core.flights.values():
            if now - flight.saved_at >= core.settings.checkpoint_seconds:
                core.checkpoint(flight, now)
        hear_store(core)
        core.recorder.watch_store()
        core.recorder.journal.flush()

    def _stalled(self, now: float) -> None:
        core = self._core
        for flight in list(core.flights.values()):
            policy = flight.rollout.policy
            state = flight.rollout.state
            if state is RolloutState.STREAMING:
                limit = policy.first_token_timeout
            elif state is RolloutState.PARTIAL:
                limit = policy.idle_timeout
            else:
                continue
            if limit is not None and now - flight.progress_at >= limit:
                timeout = core.settings.abort_timeout
                core.request_abort(flight.rollout, Reason.STALLED, by_caller=False, timeout=timeout)
