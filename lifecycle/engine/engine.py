"""`LifecycleEngine`: submit, wait, abort, collect, update weights, restore, close."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from lifecycle._version import __version__
from lifecycle.backend import Backend, UpdateMode
from lifecycle.engine.aborts import Aborts
from lifecycle.engine.attempt import fly
from lifecycle.engine.collecting import Collector, Filter, OnGroup
from lifecycle.engine.core import Core
from lifecycle.engine.delivery import deliver, hear_store
from lifecycle.engine.groups import Batch
from lifecycle.engine.handle import RolloutHandle
from lifecycle.engine.intake import Intake
from lifecycle.engine.looking import as_reason, look
from lifecycle.engine.metrics import StepMetrics
from lifecycle.engine.preparing import prepare
from lifecycle.engine.recorder import Recorder, outcome_at_rest
from lifecycle.engine.reports import AbortReport, EngineStats, RestoreReport
from lifecycle.engine.settings import Clock, EngineSettings, LoopClock
from lifecycle.engine.storage import Storage
from lifecycle.engine.tasks import EngineTasks
from lifecycle.engine.timekeeper import Timekeeper
from lifecycle.engine.updates import Updates
from lifecycle.errors import ConfigurationError, EngineClosed
from lifecycle.ledger import LedgerView, place_of
from lifecycle.log.journal import Journal, StructLogger
from lifecycle.policy import DEFAULT_POLICY, Policy
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Rollout
from lifecycle.snapshot import Snapshot
from lifecycle.states import Disposition, GateTrigger, Reason
from lifecycle.versions import VersionOrder

if TYPE_CHECKING:
    import os

    from lifecycle.stores.protocol import SnapshotStore

Scope = RolloutHandle | Iterable[RolloutHandle | str] | None


class LifecycleEngine:
    """Owns the life of every rollout submitted to it; an async context manager, on asyncio and on trio.

    `backend` is entered and closed by the caller. `log` is a path, a structlog logger or None; `store` a store or
    None. `version` is the weight label served now, if known. Further keywords are the fields of `EngineSettings`.

    Leaving the block closes the gate, ends what is in flight (bounded by `close_timeout`), saves everything and writes
    the last log line; what is unfinished stays in the store as `aborted` and can be restored.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        log: str | os.PathLike[str] | StructLogger | None = None,
        store: SnapshotStore | None = None,
        policy: Policy = DEFAULT_POLICY,
        version: str | None = None,
        clock: Clock | None = None,
        random: Random | None = None,
        run_id: str | None = None,
        **settings: Any,
    ) -> None:
        self.settings = EngineSettings.of(settings, backend)
        self.policy = policy
        self._backend = backend
        self._journal = Journal(log, run_id=run_id)
        storage = Storage(store, self._journal, self.settings)
        recorder = Recorder(self._journal, storage, clock or LoopClock(), VersionOrder(version))
        self.core = Core(self.settings, recorder.clock, random or Random(), recorder)
        self._aborts = Aborts(self.core, backend)
        self._intake = Intake(self)
        self._collector = Collector(self)
        self._updates = Updates(self, backend, self._aborts)
        self._tasks: EngineTasks | None = None
        self._closed = False
        self._step_metrics = StepMetrics(self)

    # -- life --------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start; from here on rollouts can be submitted."""
        if self._tasks is not None or self._closed:
            raise EngineClosed("an engine can be entered once")
        core, tasks = self.core, EngineTasks()
        await tasks.open()
        self._tasks = tasks
        timekeeper = Timekeeper(core, self._aborts, lambda batch: tasks.start(self._aborts.send, batch))
        core.gate_since = core.clock.monotonic()
        core.wake = timekeeper.wake
        core.on_launch = lambda flight: tasks.start(fly, core, self._backend, flight, scope=flight.scope)
        core.on_prepare = lambda rollout: tasks.start(prepare, core, self._backend, rollout)
        core.on_abort = self._aborts.add
        core.on_gone = self._aborts.resolve
        core.on_malformed = lambda ref: tasks.start(self._aborts.dismiss, ref)
        core.recorder.started(__version__, {**asdict(self.settings), "policy": asdict(self.policy)})
        self._journal.flush()
        tasks.start(timekeeper.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Close in order, whatever the reason, within bounded time."""
        assert self._tasks is not None
        try:
            with anyio.CancelScope(shield=True):
                await self.close()
        finally:
            swallow = await self._tasks.close(kind, error, trace)
        return swallow

    async def close(self, reason: Reason = Reason.SHUTDOWN) -> None:
        """Dispatch nothing any more, bring everything to rest, save, say so. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        core = self.core
        core.move_gate(GateTrigger.CLOSE, reason=reason)
        live = [rollout for rollout in core.rollouts.values() if not rollout.at_rest]
        for rollout in live:
            core.request_abort(rollout, reason, by_caller=False, timeout=self.settings.close_timeout)
        core.servers_paused = False
        with anyio.move_on_after(2 * self.settings.close_timeout):  # twice: only a bug of ours takes longer
            await self.rested(live)
        try:
            await core.recorder.storage.close()
        finally:
            hear_store(core)
            core.recorder.stopped(str(reason), core.rollouts.values())
            self._journal.close()

    # -- rollouts ----------------------------------------------------------------------------------------------

    def submit(self, item: RolloutRequest | Snapshot, *, policy: Policy | None = None) -> RolloutHandle:
        """Take a request, or a snapshot to go on from; returns at once.

        A final snapshot is at rest at once. Raises DuplicateRollout while a rollout of that id is alive here,
        StoreUnavailable when the store's backlog is full, EngineClosed outside the engine's block.
        """
        self.check(item)
        return RolloutHandle(self, self.take(item, policy))

    async def generate(self, item: RolloutRequest | Snapshot, *, policy: Policy | None = None) -> Snapshot:
        """Submit and wait. Tied: cancelling it aborts the rollout, keeps its prefix, and goes on being cancelled."""
        handle = self.submit(item, policy=policy)
        try:
            return await handle.wait()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self.abort_rollouts([handle.rollout], Reason.CANCELLED)
            raise

    async def abort(
        self,
        which: Scope = None,
        *,
        group: str | None = None,
        reason: Reason | str = Reason.REQUESTED,
        timeout: float | None = None,
    ) -> AbortReport:
        """End some rollouts, a group, or (with neither) all of ours; returns when all of them are at rest and saved.

        `reason` is a `Reason`, or words that are logged as they are. `timeout` (seconds, default `abort_timeout`)
        is how long servers may take to answer, and then a store to save. Others' requests are never touched.
        """
        limit = self.settings.abort_timeout if timeout is None else timeout
        report = await self.abort_rollouts(self._select(which, group), reason, limit)
        await self.core.recorder.storage.settled(limit)
        return report

    async def abort_all_on_servers(
        self, *, reason: Reason | str = Reason.REQUESTED, timeout: float | None = None
    ) -> AbortReport:
        """End everything the servers hold, also what is not ours (`abort_all`); ours come to rest as by `abort`."""
        self._aborts.everything = True
        try:
            return await self.abort_rollouts(self._select(None, None), reason, timeout)
        finally:
            self._aborts.everything = False

    async def abort_rollouts(
        self, rollouts: Sequence[Rollout], reason: Reason | str, timeout: float | None = None
    ) -> AbortReport:
        """What `abort` does, for rollouts already chosen."""
        began = self.core.clock.monotonic()
        limit = self.settings.abort_timeout if timeout is None else timeout
        self._aborts.keep_receipts += 1
        seen = len(self._aborts.receipts)
        try:
            why, words = as_reason(reason)
            for rollout in rollouts:
                self.core.request_abort(rollout, why, by_caller=True, timeout=limit, detail=words)
            if self._aborts.everything and not self.core.flights:
                await self._aborts.sweep()
            await self.rested(rollouts)
            receipts = tuple(self._aborts.receipts[seen:])
        finally:
            self._aborts.keep_receipts -= 1
            if self._aborts.keep_receipts == 0:
                self._aborts.receipts.clear()
        return AbortReport(
            outcomes={rollout.id: outcome_at_rest(rollout) for rollout in rollouts},
            kept=tuple(rollout.id for rollout in rollouts if rollout.tokens),
            empty=tuple(rollout.id for rollout in rollouts if not rollout.tokens),
            receipts=receipts,
            elapsed_s=self.core.clock.monotonic() - began,
        )

    def discard(self, which: RolloutHandle | str, *, reason: Reason | str = Reason.REQUESTED) -> None:
        """Give a rollout up that is pending or at rest; too late is a logged no-op."""
        rollout = self._find(which)
        self.core.discard(rollout, *as_reason(reason))

    async def collect(
        self,
        source: Iterable[Sequence[RolloutRequest | Snapshot]]
        | AsyncIterable[Sequence[RolloutRequest | Snapshot]] = (),
        *,
        target: int | None = None,
        filter: Filter | None = None,  # noqa: A002  the design's name
        max_groups: int | None = None,
        on_group: OnGroup | None = None,
    ) -> Batch:
        """Run groups until `target` of them are whole and accepted; the rest is carried to the next call.

        `source` gives groups (sequences of n requests or snapshots of one prompt) and is asked for more while there
        is room: fewer than `max_in_flight` rollouts and fewer than `max_groups` groups under way. `filter` sees
        whole groups (a list of snapshots) and says whether to keep them; it may be async. `on_group` is called with
        each delivered group at once, not only at the end. Nothing is admitted after the stop decision. Without a target everything the source gives is finished. See `Batch` for what returns.
        """
        self._check_open()
        return await self._collector.collect(
            source, target=target, accept=filter, max_groups=max_groups, on_group=on_group
        )

    async def drain(self) -> None:
        """Wait until every rollout of this engine is at rest, and saved."""
        while live := [rollout for rollout in self.core.rollouts.values() if not rollout.at_rest]:
            await self.rested(live)
        await self.core.recorder.storage.durable()

    def weight_update(
        self,
        version: str,
        mode: UpdateMode | str = UpdateMode.ABORT,
        *,
        exclusive: bool = False,
        timeout: float | None = None,
    ) -> AbstractAsyncContextManager[None]:
        """A block in which weights may be changed: `async with engine.weight_update("8"): push()`.

        `abort` ends our rollouts first and restores them afterwards; `in_place` and `retract` pause the servers.
        The label is published on success only. After an exception inside, the servers run again, the gate stays
        paused, the exception goes on, and the caller calls `resume()` or closes. `exclusive` says that the servers
        are ours alone: everything on them is ended, and none may be busy. A second update waits for the first.
        Raises UpdateTimeout when it cannot settle within `timeout` (default `update_timeout`) seconds.
        """
        self._check_open()
        limit = self.settings.update_timeout if timeout is None else timeout
        return self._updates.run(version, UpdateMode(mode), exclusive=exclusive, timeout=limit)

    def resume(self) -> None:
        """Open the gate again after a weight update that failed."""
        self._check_open()
        self.core.move_gate(GateTrigger.RESUME)

    def note_version(self, version: str) -> None:
        """Somebody else has put the weights labelled `version` on the servers; prefixes too old begin again."""
        self.core.recorder.versions.publish(version)
        self.core.restart_stale()

    async def restore(self, *, force: bool = False, resume: bool = True) -> RestoreReport:
        """Bring back what the store holds unfinished or undelivered; with `resume` the unfinished ones go on.

        What was in flight in a process that died comes back as `aborted`, reason `crash`, with the tokens of its
        last checkpoint. Only rollouts whose owner released them, or whose lease expired, are claimed; `force` takes
        the others too and is for callers who know that the owner is gone (a lock on the directory, say).
        """
        self._check_open()
        rollouts, unreadable = await self._intake.restore(force=force, resume=resume)
        self._collector.adopt(rollouts)
        return RestoreReport(tuple(RolloutHandle(self, rollout) for rollout in rollouts), unreadable)

    # -- looking -----------------------------------------------------------------------------------------------

    @property
    def process_id(self) -> str:
        """The name of this process in logs and as an owner in stores."""
        return self._journal.identity.process_id

    @property
    def run_id(self) -> str:
        """The name of the run in logs."""
        return self._journal.identity.run_id

    @property
    def step(self) -> int | None:
        """The training step that log lines carry; set it as often as you like."""
        return self._journal.step

    @step.setter
    def step(self, step: int | None) -> None:
        self._journal.step = step

    @property
    def version(self) -> str | None:
        """The weight label last published."""
        return self.core.recorder.versions.current

    def stats(self) -> EngineStats:
        """Numbers of this moment."""
        return look(self.core, self._aborts, self._journal)

    def metrics(self) -> dict[str, float]:
        """Plain numbers for an experiment tracker: what is so now, and what happened since the last call."""
        return self._step_metrics.take()

    def ledger(self) -> LedgerView:
        """Where every rollout is and what became of every token."""
        return self.core.recorder.ledger.view(self.core.rollouts.values())

    def places(self) -> dict[str, str]:
        """The place in the ledger of every rollout this engine still holds, by id."""
        return {name: place_of(rollout) for name, rollout in self.core.rollouts.items()}

    def handle(self, rollout_id: str) -> RolloutHandle:
        """The handle of a rollout this engine holds. Raises KeyError."""
        return RolloutHandle(self, self.core.rollouts[rollout_id])

    # -- used by the parts -------------------------------------------------------------------------------------

    async def deliver(self, moves: Sequence[tuple[Rollout, Disposition]]) -> None:
        """Make dispositions durable, then log them; see `delivery.deliver`."""
        await deliver(self.core, moves)

    @property
    def tasks(self) -> EngineTasks:
        """Where the parts start tasks that outlive a call."""
        self._check_open()
        assert self._tasks is not None
        return self._tasks

    def collects(self, rollout: Rollout) -> bool:
        """Whether a running `collect` decides what becomes of a rollout."""
        return self._collector.holds(rollout)

    def check(self, item: RolloutRequest | Snapshot) -> None:
        """Raise what `submit` would raise."""
        self._check_open()
        self._intake.check(item)

    def take(self, item: RolloutRequest | Snapshot, policy: Policy | None = None) -> Rollout:
        """Submit what was checked."""
        return self._intake.take(item, policy or self.policy)

    def go_on(self, rollout: Rollout) -> None:
        """Queue a rollout that is neither final nor on its way."""
        self._intake.go_on(rollout)

    async def rested(self, rollouts: Iterable[Rollout]) -> None:
        """Wait until all of them are at rest."""
        for rollout in rollouts:
            while not rollout.at_rest:
                await self.core.waiters.rest_event(rollout).wait()

    def _check_open(self) -> None:
        if self._tasks is None or self._closed:
            raise EngineClosed("the engine is not open: use it inside `async with LifecycleEngine(...)`")

    def _find(self, which: RolloutHandle | str) -> Rollout:
        if isinstance(which, RolloutHandle):
            return which.rollout
        try:
            return self.core.rollouts[which]
        except KeyError:
            raise ConfigurationError(f"this engine holds no rollout {which!r}") from None

    def _select(self, which: Scope, group: str | None) -> list[Rollout]:
        if which is not None and group is not None:
            raise ConfigurationError("give rollouts or a group, not both")
        if which is not None:
            chosen = [which] if isinstance(which, RolloutHandle | str) else which
            return [self._find(one) for one in chosen]
        rollouts = self.core.rollouts.values()
        if group is not None:
            return [rollout for rollout in rollouts if rollout.request.group == group]
        return [rollout for rollout in rollouts if not rollout.at_rest]
