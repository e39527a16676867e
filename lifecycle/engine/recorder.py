"""The one place where a change becomes a log line, a ledger entry and a stored snapshot, in this order."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lifecycle.backend import AbortReceipt, WorkerReceipt
from lifecycle.engine.settings import Clock
from lifecycle.engine.storage import Storage
from lifecycle.events import Anomaly, StreamEvent, TokenSlice
from lifecycle.ledger import Ledger
from lifecycle.log.journal import Journal, shorten
from lifecycle.log.records import (
    AbortSent,
    BackendOutage,
    BackendRecovered,
    EngineStarted,
    EngineStopped,
    GateReceipt,
    GateTransition,
    GroupRecord,
    RolloutDisposition,
    RolloutRest,
    RolloutRestored,
    RolloutTransition,
    SnapshotFailed,
    StreamAnomaly,
)
from lifecycle.machine import TABLES
from lifecycle.rollout import Change, Rollout
from lifecycle.snapshot import Snapshot, take, take_tail
from lifecycle.states import Disposition, Outcome, Trigger
from lifecycle.versions import VersionOrder

STORE_SILENT_SECONDS = 5.0


class Recorder:
    """Log first, then books, then store: the line of a transition exists before anybody acts on it."""

    def __init__(self, journal: Journal, storage: Storage, clock: Clock, versions: VersionOrder) -> None:
        self.journal = journal
        self.storage = storage
        self.clock = clock
        self.versions = versions
        self.ledger = Ledger()
        self.outcomes: Counter[str] = Counter()
        self._tell_silence_at = STORE_SILENT_SECONDS

    # -- rollouts ----------------------------------------------------------------------------------------------

    def change(self, rollout: Rollout, change: Change) -> None:
        """Write down one transition."""
        if change.dropped_tokens:
            self.ledger.dropped[str(change.reason)] += change.dropped_tokens
        if change.trigger is Trigger.RESTORE:
            self.ledger.saved_tokens += len(rollout.tokens)
        if change.outcome is not None:
            self.outcomes[str(change.outcome)] += 1
        if not self.journal.enabled:
            return
        self.journal.emit(
            RolloutTransition(
                **self._about(rollout),
                trigger=change.trigger,
                source=change.source,
                dest=change.dest,
                tokens=change.tokens,
                new_tokens=change.new_tokens,
                dropped_tokens=change.dropped_tokens,
                weight_version=rollout.version,
                current_version=self.versions.current,
                reason=change.reason,
                detail=shorten(change.detail),
                outcome=change.outcome,
                finish_reason=rollout.finish_reason,
                dwell_s=round(change.dwell_s, 6),
                worker=rollout.attempts[-1].worker if rollout.attempts else None,
            )
        )

    def restored(self, rollout: Rollout, snapshot: Snapshot, dropped: int = 0) -> None:
        """A rollout came in from a snapshot."""
        rollout.seq += 1
        self.journal.emit(
            RolloutRestored(
                **self._about(rollout),
                state=rollout.state,
                tokens=len(rollout.tokens),
                dropped_tokens=dropped,
                reason=rollout.reason,
                disposition=rollout.disposition,
                from_process=snapshot.process,
                epoch=rollout.epoch,
            )
        )

    def rest(self, rollout: Rollout) -> None:
        """A rollout came to rest: say so, make the lines visible, save it."""
        rollout.seq += 1
        attempts = rollout.attempts
        first = next((a.first_token_at for a in attempts if a.first_token_at is not None), None)
        self.journal.emit(
            RolloutRest(
                **self._about(rollout),
                state=rollout.state,
                tokens=len(rollout.tokens),
                observed_tokens=sum(a.end - a.start for a in attempts),
                spans=[(s.version, s.start, s.end, str(s.source)) for s in rollout.spans],
                disposition=rollout.disposition,
                reason=rollout.reason,
                outcome=rollout.outcome,
                finish_reason=rollout.finish_reason,
                current_version=self.versions.current,
                duration_s=round(self.clock.monotonic() - rollout.submitted_at, 6),
                first_token_s=None
                if first is None
                else round(max(0.0, first - attempts[0].dispatched_at), 6),
                worker=attempts[-1].worker if attempts else None,
                carries=rollout.carries,
                versions=len({span.version for span in rollout.spans}),
            )
        )
        self.journal.flush()
        self.save(rollout)

    def save(self, rollout: Rollout, *, rollback: bool = False) -> None:
        """Hand a whole snapshot to the store; not of what is another owner's by now, whatever epoch we hold."""
        if self.storage.enabled and not rollout.fenced:
            self.storage.put(
                take(rollout, self.journal.identity.process_id), rollout.epoch, rollback=rollback
            )

    def checkpoint(self, rollout: Rollout, start: int) -> None:
        """Hand what a rollout in flight has gained since `start` to the store."""
        if self.storage.enabled and not rollout.fenced:
            self.storage.append(take_tail(rollout, start), rollout.epoch)

    def mark(self, rollout: Rollout, disposition: Disposition) -> None:
        """Hand a disposition to the store; the log line follows when it is durable (`disposed`)."""
        rollout.disposition = disposition
        if self.storage.enabled and not rollout.fenced:
            self.storage.mark(rollout.id, disposition, rollout.epoch)

    def disposed(self, rollout: Rollout, reason: str | None = None) -> None:
        """Write down what became of a rollout at rest."""
        rollout.seq += 1
        self.journal.emit(
            RolloutDisposition(
                **self._about(rollout),
                disposition=rollout.disposition,
                state=rollout.state,
                tokens=len(rollout.tokens),
                reason=reason,
                lag=self.versions.lag(rollout.spans),
            )
        )

    def group(
        self,
        record: type[GroupRecord],
        members: Sequence[Rollout],
        *,
        began: float | None,
        reason: str | None = None,
        **more: Any,
    ) -> None:
        """Write down something about a group."""
        duration = None if began is None else round(self.clock.monotonic() - began, 6)
        self.journal.emit(
            record(
                **self._common(),
                group_id=members[0].request.group,
                group_size=len(members),
                members=[member.id for member in members],
                tokens=sum(len(member.tokens) for member in members),
                duration_s=duration,
                reason=reason,
                **more,
            )
        )

    def anomaly(self, rollout: Rollout, rid: str | None, anomaly: Anomaly) -> None:
        """Write down something odd that changes nothing."""
        self.journal.emit(
            StreamAnomaly(
                **self._common(),
                rollout_id=rollout.id,
                attempt=rollout.attempt,
                rid=rid,
                kind=anomaly.kind,
                detail=shorten(anomaly.detail) or "",
            )
        )

    def refused(self, rollout_id: str, rollout: Rollout | None, error: Exception) -> None:
        """Write down that the store refused a write of a rollout for good; it may have left the registry since."""
        self.journal.emit(
            StreamAnomaly(
                **self._common(),
                rollout_id=rollout_id,
                attempt=0 if rollout is None else rollout.attempt,
                rid=None if rollout is None else rollout.rid,
                kind="snapshot_refused",
                detail=shorten(str(error)) or type(error).__name__,
            )
        )

    def late(self, rollout: Rollout, rid: str, batch: Sequence[StreamEvent]) -> None:
        """Write down that an attempt which is over still said something."""
        tokens = sum(len(event.tokens) for event in batch if isinstance(event, TokenSlice))
        detail = f"{tokens} tokens in {len(batch)} events after the attempt was over"
        self.anomaly(rollout, rid, Anomaly("late_event", detail))

    def watch_store(self) -> None:
        """Write down that the store stands still, each time that it has done so for twice as long.

        A store that refuses is told by its writer, which hears the error; one that does not answer, by nobody else.
        """
        silent = self.storage.silent_for(self.clock.monotonic())
        if silent < STORE_SILENT_SECONDS:
            self._tell_silence_at = STORE_SILENT_SECONDS
            return
        stats = self.storage.stats()
        if silent < self._tell_silence_at or stats["failing_tries"]:
            return
        self._tell_silence_at = 2 * silent
        waiting = stats["backlog_operations"]
        self.journal.emit(
            SnapshotFailed(
                **self._common(),
                operations=waiting,
                error=f"the store has saved nothing for {silent:.0f} s and does not say why",
                tries=0,
                backlog=waiting,
                retry_s=0.0,
            )
        )

    # -- the rest ----------------------------------------------------------------------------------------------

    def gate(self, trigger: str, source: str, dest: str, dwell_s: float, **about: str | None) -> None:
        """Write down a transition of the gate; `about` may hold mode, version and reason."""
        self.journal.emit(
            GateTransition(
                **self._common(),
                trigger=trigger,
                source=source,
                dest=dest,
                mode=about.get("mode"),
                version=about.get("version"),
                reason=about.get("reason"),
                current_version=self.versions.current,
                dwell_s=round(dwell_s, 6),
            )
        )

    def receipts(self, action: str, receipts: Iterable[WorkerReceipt]) -> None:
        """Write down what workers answered to a control call."""
        for receipt in receipts:
            self.journal.emit(
                GateReceipt(
                    **self._common(),
                    action=action,
                    worker=receipt.worker,
                    status=receipt.status,
                    detail=shorten(receipt.detail),
                    version=receipt.version,
                    running=receipt.running,
                    waiting=receipt.waiting,
                )
            )

    def aborts(self, receipts: Iterable[AbortReceipt], *, round_: int, pending: int) -> None:
        """Write down what workers answered to a batch of aborts."""
        for receipt in receipts:
            self.journal.emit(
                AbortSent(
                    **self._common(),
                    rollouts=len(receipt.rids),
                    rids=list(receipt.rids),
                    strategy=receipt.strategy,
                    worker=receipt.worker,
                    status=receipt.status,
                    detail=shorten(receipt.detail),
                    requests=receipt.requests,
                    latency_s=round(receipt.latency_s, 6),
                    round=round_,
                    pending=pending,
                )
            )

    def outage(self, reason: str, detail: str | None, failures: int, retry_s: float) -> None:
        """Write down that dispatching waits."""
        self.journal.emit(
            BackendOutage(
                **self._common(),
                reason=reason,
                detail=shorten(detail),
                failures=failures,
                retry_s=round(retry_s, 6),
            )
        )

    def recovered(self, outage_s: float) -> None:
        """Write down that requests are accepted again."""
        self.journal.emit(BackendRecovered(**self._common(), outage_s=round(outage_s, 6)))

    def started(self, version: str, settings: Mapping[str, Any]) -> None:
        """The first line."""
        self.journal.emit(
            EngineStarted(
                **self._common(),
                version=version,
                python=platform.python_version(),
                tables={name: table.as_dict() for name, table in TABLES.items()},
                settings=dict(settings),
            )
        )

    def stopped(self, reason: str, live: Iterable[Rollout]) -> None:
        """The last line."""
        view = self.ledger.view(live)
        states = {place: count for place, count in view.rollouts.items() if count}
        self.journal.emit(
            EngineStopped(**self._common(), reason=reason, states=states, ledger=view.as_dict())
        )

    def _common(self) -> dict[str, Any]:
        identity = self.journal.identity
        return {
            "ts": self.clock.wall(),
            "run_id": identity.run_id,
            "process_id": identity.process_id,
            "step": self.journal.step,
        }

    def _about(self, rollout: Rollout) -> dict[str, Any]:
        request = rollout.request
        identity = self.journal.identity
        return {
            "ts": self.clock.wall(),
            "run_id": identity.run_id,
            "process_id": identity.process_id,
            "step": self.journal.step,
            "seq": rollout.seq,
            "rollout_id": request.id,
            "group_id": request.group,
            "group_size": request.group_size,
            "attempt": rollout.attempt,
            "rid": rollout.rid,
        }


def outcome_at_rest(rollout: Rollout) -> Outcome:
    """What an abort of a rollout that is already at rest comes to."""
    if rollout.outcome is not None:
        return rollout.outcome
    by_state = {"completed": Outcome.FINISHED, "failed": Outcome.REJECTED}
    return by_state.get(str(rollout.state), Outcome.NEVER_SENT)
