"""The synchronous heart: what is known, and what every event does to it. Nothing in this file waits.

All entry points run to their end without another task in between, so a decision is never made on half a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from lifecycle.call import CallRef
from lifecycle.engine.decide import Next, decide
from lifecycle.engine.flight import Flight
from lifecycle.engine.outage import OUTAGE_REASONS, Outage
from lifecycle.engine.queue import ReadyQueue
from lifecycle.engine.recorder import Recorder
from lifecycle.engine.settings import Clock, EngineSettings
from lifecycle.engine.waiters import Waiters
from lifecycle.errors import StreamMalformed
from lifecycle.events import Accepted, Anomaly, ChannelData, EndKind, StreamEnd, StreamEvent, TokenSlice
from lifecycle.machine import GateCursor
from lifecycle.policy import OnAbort
from lifecycle.rollout import Change, Rollout
from lifecycle.states import (
    Disposition,
    FinishReason,
    GateState,
    GateTrigger,
    Reason,
    RolloutState,
    Trigger,
)


class Core:
    """Rollouts, flights, the gate, the queue; `start` and `wake` are how it asks the async side for work."""

    def __init__(self, settings: EngineSettings, clock: Clock, random: Random, recorder: Recorder) -> None:
        self.settings = settings
        self.clock = clock
        self.random = random
        self.recorder = recorder
        self.rollouts: dict[str, Rollout] = {}
        self.flights: dict[str, Flight] = {}
        self.preparing: set[str] = set()
        self.queue = ReadyQueue()
        self.outage = Outage(settings, random)
        self.gate = GateCursor(GateState.OPEN)
        self.gate_since = 0.0
        self.servers_paused = False
        self.attempts = 0
        self.give_ups = 0  # probes that failed after an outage had lasted too long
        self.waiters = Waiters()
        self.on_rest: list[Callable[[Rollout], None]] = []
        self.on_launch: Callable[[Flight], object] = _unset
        self.on_prepare: Callable[[Rollout], object] = _unset
        self.on_abort: Callable[[Flight, float], object] = _unset
        self.on_gone: Callable[[Flight], object] = _unset
        self.on_malformed: Callable[[CallRef], object] = _unset
        self.wake: Callable[[], object] = _unset

    # -- coming in ---------------------------------------------------------------------------------------------

    @property
    def closing(self) -> bool:
        """The engine takes no more work."""
        return self.gate.state is GateState.CLOSED

    @property
    def load(self) -> int:
        """Rollouts that are not at rest."""
        return len(self.queue) + len(self.preparing) + len(self.flights)

    def register(self, rollout: Rollout) -> None:
        """Make a rollout known."""
        self.rollouts[rollout.id] = rollout
        self.recorder.ledger.entered(rollout)

    def enqueue(self, rollout: Rollout, delay: float = 0.0) -> None:
        """Let a pending rollout be dispatched, `delay` seconds from now at the earliest."""
        due = self.clock.monotonic() + delay if delay > 0 else None
        self.queue.push(rollout, due)
        self.wake()

    def resume(self, rollout: Rollout, reason: Reason = Reason.RESUMED) -> None:
        """Restore an aborted rollout and queue it; tokens too old for its policy are dropped, and counted."""
        stale = self.too_stale(rollout)
        rollout.by_caller = False
        rollout.fruitless = rollout.preempts = 0
        restart = stale or rollout.policy.on_abort is OnAbort.RESTART
        self._restore(rollout, Reason.STALE if stale else reason, restart=restart)
        self.enqueue(rollout)

    def _restore(self, rollout: Rollout, reason: Reason | None, *, restart: bool) -> None:
        change = rollout.restore(self.clock.monotonic(), reason, restart=restart)
        if rollout.disposition is Disposition.CARRIED:
            rollout.disposition = Disposition.NONE
        self.recorder.change(rollout, change)
        self.recorder.save(rollout, rollback=restart)

    def too_stale(self, rollout: Rollout) -> bool:
        """Whether its oldest token is further behind than its policy allows."""
        limit = rollout.policy.max_staleness
        if limit is None or not rollout.tokens:
            return False
        lag = self.recorder.versions.lag(rollout.spans)
        return lag is not None and lag > limit

    # -- going out ---------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Dispatch what may be dispatched now."""
        while self._has_room:
            now = self.clock.monotonic()
            rollout = None if self.outage.blocks(now) else self.queue.pop(now)
            if rollout is None:
                return
            if rollout.nothing_left is not None:
                self._finish_unsent(rollout, rollout.nothing_left, now)
            elif rollout.prompt_ids is None:
                self.preparing.add(rollout.id)
                self.outage.probing = self.outage.active
                self.on_prepare(rollout)
            else:
                self._launch(rollout, now)

    @property
    def _has_room(self) -> bool:
        under_way = len(self.flights) + len(self.preparing)
        return self.gate.state is GateState.OPEN and under_way < self.settings.max_in_flight

    def next_dispatch(self) -> float | None:
        """When `pump` has something to do next; None while only news can change that."""
        due = self.queue.next_due()
        if due is None or self.outage.probing or not self._has_room:
            return None
        return max(due, self.outage.retry_at) if self.outage.active else due

    def _finish_unsent(self, rollout: Rollout, why: FinishReason, now: float) -> None:
        change = rollout.move(Trigger.FINISH, now, reason=Reason(str(why)))
        rollout.finish_reason = why
        rollout.matched = rollout.tokens[-1] if why is FinishReason.STOP else None
        self.recorder.change(rollout, change)
        self._rest(rollout)

    def _launch(self, rollout: Rollout, now: float) -> None:
        rid = f"{self.random.getrandbits(128):032x}"
        change = rollout.dispatch(rid, now, self.clock.wall())
        self.recorder.change(rollout, change)
        self.attempts += 1
        flight = Flight(
            rollout, rid, rollout.attempt, now, now, len(rollout.tokens), probe=self.outage.active
        )
        self.outage.probing = flight.probe
        self.flights[rid] = flight
        self.on_launch(flight)

    # -- what streams say --------------------------------------------------------------------------------------

    def absorb(self, flight: Flight, batch: Sequence[StreamEvent]) -> bool:
        """Apply one socket read to its rollout; True when the attempt is over."""
        rollout = flight.rollout
        if self.flights.get(flight.rid) is not flight:
            self.recorder.late(rollout, flight.rid, batch)
            return True
        now = self.clock.monotonic()
        for event in batch:
            if isinstance(event, TokenSlice):
                end = self._observe(flight, event, now)
            else:
                end = self._other(flight, event)
            if end is not None:
                self.ended(flight, end)
                return True
        if not flight.accepted:
            self._accept(flight)
        flight.progress_at = now
        if len(rollout.tokens) - flight.saved_tokens >= self.settings.checkpoint_tokens:
            self.checkpoint(flight, now)
        if self.waiters.anybody_watches:
            self.waiters.news(rollout)
        return False

    def _other(self, flight: Flight, event: StreamEnd | ChannelData | Accepted | Anomaly) -> StreamEnd | None:
        if isinstance(event, StreamEnd):
            return event
        if isinstance(event, ChannelData):
            flight.rollout.keep_channel(event)
        elif isinstance(event, Accepted):
            flight.rollout.attempts[-1].worker = event.worker
        else:
            self.recorder.anomaly(flight.rollout, flight.rid, event)
        return None

    def _observe(self, flight: Flight, event: TokenSlice, now: float) -> StreamEnd | None:
        rollout = flight.rollout
        wall = self.clock.wall() if rollout.attempts[-1].first_token_at is None else 0.0
        try:
            change = rollout.observe(event, now, wall)
        except StreamMalformed as error:
            return StreamEnd(EndKind.REJECTED, Reason.MALFORMED, str(error))
        recorder = self.recorder
        recorder.ledger.observed += len(event.tokens)
        if event.version is not None:
            recorder.versions.meet(event.version)
        if change is not None:
            recorder.change(rollout, change)
        return None

    def _accept(self, flight: Flight) -> None:
        flight.accepted = True
        lasted = self.outage.accepted(self.clock.monotonic())
        if lasted is not None:
            self.recorder.recovered(lasted)
            self.wake()

    def ended(self, flight: Flight, end: StreamEnd) -> None:
        """The stream is over: close the attempt and decide what comes next."""
        rollout, now = flight.rollout, self.clock.monotonic()
        self._gone(flight)
        change, anomaly = rollout.end(end, now, self.clock.wall())
        turned_away = end.kind is EndKind.LOST and end.reason in OUTAGE_REASONS
        if turned_away and not flight.accepted:
            self.note_outage(end.reason, end.detail)
        elif not flight.accepted:
            self._accept(flight)
        if end.reason is Reason.MALFORMED:
            self.on_malformed(flight.ref)
        if anomaly is not None:
            self.recorder.anomaly(rollout, flight.rid, anomaly)
        self.settle(rollout, change)

    def expire(self, flight: Flight, reason: Reason) -> None:
        """Stop waiting for an abort to be answered: close the stream and say that it may have leaked."""
        self._gone(flight)
        if flight.probe:
            self.outage.probe_ended()
        change = flight.rollout.expire(reason, self.clock.monotonic(), self.clock.wall())
        flight.scope.cancel()
        self.settle(flight.rollout, change)

    def _gone(self, flight: Flight) -> None:
        del self.flights[flight.rid]
        self.on_gone(flight)

    def note_outage(self, reason: Reason, detail: str | None) -> None:
        """Nobody took the request: wait before the next one, and after too long let go what waits."""
        now = self.clock.monotonic()
        delay = self.outage.failed(now)
        if delay is not None:
            self.recorder.outage(reason, detail, self.outage.failures, delay)
            if self.outage.expired(now):
                self.give_ups += 1
                self._give_up_pending()
        self.wake()

    def _give_up_pending(self) -> None:
        """The backend has been out for too long: what waits for it comes to rest, resumable."""
        for rollout in [r for r in self.rollouts.values() if r.state is RolloutState.PENDING]:
            self.request_abort(rollout, Reason.UNREACHABLE, by_caller=False, timeout=0.0)

    # -- ends and aborts ---------------------------------------------------------------------------------------

    def settle(self, rollout: Rollout, change: Change) -> None:
        """Record a change that ended an attempt or a wait, and do in the same step what follows from it."""
        self.recorder.change(rollout, change)
        if rollout.state is RolloutState.ABORTED:
            self._after_abort(rollout, change)
        else:
            self._rest(rollout)
        self.waiters.news(rollout)
        self.wake()

    def _after_abort(self, rollout: Rollout, change: Change) -> None:
        now = self.clock.monotonic()
        unreachable = change.reason in OUTAGE_REASONS and self.outage.expired(now)
        decision = decide(rollout, change, closing=self.closing, unreachable=unreachable)
        if decision.next is Next.RESTORE:
            stale = self.too_stale(rollout)
            self._restore(
                rollout, Reason.STALE if stale else decision.reason, restart=stale or decision.restart
            )
            self.enqueue(rollout, decision.delay_s * (0.5 + self.random.random() / 2))
            return
        if decision.next is Next.EXHAUST:
            why = ": ".join(filter(None, (change.reason, change.detail)))  # the last attempt ended
            exhaust = rollout.move(Trigger.EXHAUST, now, reason=decision.reason, detail=why)
            self.recorder.change(rollout, exhaust)
        elif decision.next is Next.DISCARD:
            self.recorder.change(rollout, rollout.move(Trigger.DISCARD, now, reason=decision.reason))
        elif unreachable and rollout.reason is not Reason.UNREACHABLE:
            rollout.reason = Reason.UNREACHABLE
        self._rest(rollout)

    def request_abort(
        self, rollout: Rollout, reason: Reason, *, by_caller: bool, timeout: float, detail: str | None = None
    ) -> None:
        """Ask for an end. Late and repeated asks are logged and change nothing but the caller's intent."""
        source = rollout.state
        if not rollout.at_rest:
            rollout.by_caller = rollout.by_caller or by_caller
        if source in {RolloutState.STREAMING, RolloutState.PARTIAL} or (by_caller and not rollout.at_rest):
            rollout.abort_reason = reason
        change = rollout.move(Trigger.ABORT, self.clock.monotonic(), reason=reason, detail=detail)
        if source is RolloutState.PENDING:
            self.queue.drop(rollout)
            self.settle(rollout, change)
            return
        self.recorder.change(rollout, change)
        if rollout.state is RolloutState.ABORTING and rollout.rid is not None:
            self.on_abort(self.flights[rollout.rid], timeout)

    def discard(self, rollout: Rollout, reason: Reason, detail: str | None = None) -> None:
        """Give a rollout up that is pending or at rest."""
        self.queue.drop(rollout)
        source = rollout.state
        change = rollout.move(Trigger.DISCARD, self.clock.monotonic(), reason=reason, detail=detail)
        self.recorder.change(rollout, change)
        if rollout.state is not source:
            self._rest(rollout)

    def fence(self, rollout: Rollout) -> None:
        """Another owner has it: stop our copy, deliver nothing of it."""
        rollout.fenced = True
        rollout.disposition = Disposition.NONE
        rollout.by_caller = True
        if not rollout.at_rest:
            self.request_abort(rollout, Reason.FENCED, by_caller=True, timeout=self.settings.abort_timeout)
        if rollout.at_rest:
            self._release(rollout)

    def _release(self, rollout: Rollout) -> None:
        if self.rollouts.get(rollout.id) is rollout:
            del self.rollouts[rollout.id]
            self.recorder.ledger.release(rollout)
            self.recorder.disposed(rollout, str(Reason.FENCED))

    def _rest(self, rollout: Rollout) -> None:
        self.recorder.rest(rollout)
        if rollout.fenced:
            self._release(rollout)
        if rollout.state is RolloutState.DISCARDED:
            self.retire(rollout)
        self.waiters.rested(rollout)
        for listener in self.on_rest:
            listener(rollout)

    def retire(self, rollout: Rollout) -> None:
        """A final rollout whose disposition is known leaves the registry."""
        if self.rollouts.get(rollout.id) is rollout:
            del self.rollouts[rollout.id]
            self.recorder.ledger.retire(rollout)

    def checkpoint(self, flight: Flight, now: float) -> None:
        """Save what an attempt has gained since the last time."""
        rollout = flight.rollout
        if len(rollout.tokens) > flight.saved_tokens:
            self.recorder.checkpoint(rollout, flight.saved_tokens)
        flight.saved_tokens, flight.saved_at = len(rollout.tokens), now

    def checkpoint_all(self) -> None:
        """Save what every attempt in flight has gained."""
        now = self.clock.monotonic()
        for flight in self.flights.values():
            self.checkpoint(flight, now)

    # -- the gate ----------------------------------------------------------------------------------------------

    def move_gate(self, trigger: GateTrigger, **about: str | None) -> None:
        """Fire a trigger of the gate and log it."""
        now = self.clock.monotonic()
        source = self.gate.state
        dest = self.gate.fire(trigger)
        self.recorder.gate(trigger, source, dest, max(0.0, now - self.gate_since), **about)
        if dest is not source:
            self.gate_since = now
        if dest is GateState.OPEN and source is not GateState.OPEN:
            self._restart_clocks(now)
        self.wake()

    def _restart_clocks(self, now: float) -> None:
        """Watchdogs of streams do not count the time the gate was not open."""
        for flight in self.flights.values():
            flight.progress_at = now

    def restart_stale(self) -> None:
        """After a new version was published: pending rollouts too old for their policy begin again."""
        for rollout in list(self.rollouts.values()):
            if rollout.state is RolloutState.PENDING and self.too_stale(rollout):
                self.queue.drop(rollout)
                change = rollout.move(Trigger.ABORT, self.clock.monotonic(), reason=Reason.STALE)
                self.recorder.change(rollout, change)
                self._restore(rollout, Reason.STALE, restart=True)
                self.enqueue(rollout)


def _unset(*_: Any) -> None:
    raise AssertionError("the engine has not been entered")
