"""How rollouts come into an engine: fresh, from a snapshot, or back from the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lifecycle.errors import DuplicateRollout, SnapshotError
from lifecycle.policy import Policy
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Rollout
from lifecycle.snapshot import Snapshot, revive
from lifecycle.states import Disposition, Reason, RolloutState

if TYPE_CHECKING:
    from lifecycle.engine.engine import LifecycleEngine


class Intake:
    """Checks what comes in and puts it on its way."""

    def __init__(self, engine: LifecycleEngine) -> None:
        self._engine = engine

    def submit(self, item: RolloutRequest | Snapshot, policy: Policy) -> Rollout:
        """Register and queue; see `LifecycleEngine.submit`."""
        core = self._engine.core
        core.recorder.storage.admit()
        if isinstance(item, Snapshot):
            return self._from_snapshot(item, policy)
        known = core.rollouts.get(item.id)
        if known is not None:
            raise DuplicateRollout(item.id, str(known.state))
        rollout = Rollout(item, now=core.clock.monotonic(), policy=policy)
        core.register(rollout)
        core.recorder.save(rollout)
        core.enqueue(rollout)
        return rollout

    def _from_snapshot(self, snapshot: Snapshot, policy: Policy) -> Rollout:
        core = self._engine.core
        known = core.rollouts.get(snapshot.id)
        if known is not None:
            return self._again(known, snapshot, policy)
        rollout = revive(snapshot, now=core.clock.monotonic(), policy=policy)
        rollout.disposition = Disposition.NONE  # whoever hands it in wants it again
        self._come_in(rollout, snapshot)
        core.recorder.save(rollout)
        self.go_on(rollout)
        return rollout

    def _again(self, known: Rollout, snapshot: Snapshot, policy: Policy) -> Rollout:
        """A snapshot of a rollout we hold at rest: go on with ours, if it is the same one."""
        same = known.tokens == snapshot.tokens and known.state == snapshot.state
        if not known.at_rest or not same:
            raise DuplicateRollout(snapshot.id, str(known.state))
        known.policy = policy
        self.go_on(known)
        return known

    def _come_in(self, rollout: Rollout, snapshot: Snapshot) -> None:
        core = self._engine.core
        for span in snapshot.spans:
            core.recorder.versions.meet(span.version)
        core.register(rollout)
        core.recorder.restored(rollout, snapshot)

    def go_on(self, rollout: Rollout) -> None:
        """Queue what is neither final nor already on its way."""
        core = self._engine.core
        on_its_way = rollout.id in core.queue or rollout.id in core.preparing
        if rollout.state is RolloutState.ABORTED:
            core.resume(rollout)
        elif rollout.state is RolloutState.PENDING and not on_its_way:
            core.enqueue(rollout)

    async def restore(self, *, force: bool, resume: bool) -> tuple[list[Rollout], tuple[SnapshotError, ...]]:
        """Claim what the store holds; see `LifecycleEngine.restore`."""
        engine, core = self._engine, self._engine.core
        claim = await core.recorder.storage.claim(force=force)
        rollouts: list[Rollout] = []
        for claimed in claim.claimed:
            if claimed.snapshot.id in core.rollouts:
                core.rollouts[claimed.snapshot.id].epoch = claimed.epoch
                continue
            rollout = revive(claimed.snapshot, now=core.clock.monotonic(), policy=engine.policy)
            rollout.epoch = claimed.epoch
            self._come_in(rollout, claimed.snapshot)
            if rollout.reason is Reason.CRASH:
                core.recorder.save(rollout)
            rollouts.append(rollout)
        if resume:
            for rollout in rollouts:
                self.go_on(rollout)
        return rollouts, claim.unreadable
