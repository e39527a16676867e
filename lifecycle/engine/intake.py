"""How rollouts come into an engine: fresh, from a snapshot, or back from the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lifecycle.engine.delivery import hear_store
from lifecycle.errors import DuplicateRollout, SnapshotError
from lifecycle.policy import Policy
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Rollout
from lifecycle.snapshot import Snapshot, revive
from lifecycle.states import Disposition, Reason, RolloutState

if TYPE_CHECKING:
    from lifecycle.engine.engine import LifecycleEngine
    from lifecycle.stores.protocol import Claimed


class Intake:
    """Checks what comes in and puts it on its way."""

    def __init__(self, engine: LifecycleEngine) -> None:
        self._engine = engine

    def check(self, item: RolloutRequest | Snapshot) -> None:
        """Raise what stands against taking it in: DuplicateRollout, StoreUnavailable."""
        core = self._engine.core
        core.recorder.storage.admit()
        known = core.rollouts.get(item.id)
        if known is not None and not (isinstance(item, Snapshot) and _is_same(known, item)):
            raise DuplicateRollout(item.id, str(known.state))

    def take(self, item: RolloutRequest | Snapshot, policy: Policy) -> Rollout:
        """Register and queue what was checked."""
        core = self._engine.core
        if isinstance(item, Snapshot):
            return self._from_snapshot(item, policy)
        rollout = Rollout(item, now=core.clock.monotonic(), policy=policy)
        core.register(rollout)
        core.recorder.save(rollout)
        core.enqueue(rollout)
        return rollout

    def _from_snapshot(self, snapshot: Snapshot, policy: Policy) -> Rollout:
        core = self._engine.core
        rollout = core.rollouts.get(snapshot.id)
        if rollout is not None:  # it rests here already: go on with our own
            rollout.policy = policy
        else:
            rollout = revive(snapshot, now=core.clock.monotonic(), policy=policy)
            rollout.disposition = Disposition.NONE  # whoever hands it in wants it again
            self._come_in(rollout, snapshot)
            core.recorder.save(rollout)
        self.go_on(rollout)
        return rollout

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
        hear_store(core)  # of the copies here that the claim has overtaken
        rollouts: list[Rollout] = []
        for claimed in claim.claimed:
            if await self._still_ours(claimed):
                continue
            rollout = revive(claimed.snapshot, now=core.clock.monotonic(), policy=engine.policy)
            rollout.epoch = claimed.epoch
            self._come_in(rollout, claimed.snapshot)
            if rollout.reason is Reason.CRASH or rollout.state is RolloutState.PENDING:
                core.recorder.save(rollout)  # in our name: tails that we append say nothing of who wrote them
            rollouts.append(rollout)
        if resume:
            for rollout in rollouts:
                self.go_on(rollout)
        return rollouts, claim.unreadable

    async def _still_ours(self, claimed: Claimed) -> bool:
        """Whether our living copy goes on, under the new epoch. If another owner wrote since, it ends instead."""
        rollout = self._engine.core.rollouts.get(claimed.snapshot.id)
        if rollout is None:
            return False
        if claimed.snapshot.process == self._engine.process_id and not rollout.fenced:
            rollout.epoch = claimed.epoch
            return True
        self._engine.core.fence(rollout)
        await self._engine.rested([rollout])
        return False


def _is_same(known: Rollout, snapshot: Snapshot) -> bool:
    """Whether a snapshot is of the rollout we hold at rest, as it stands, with nothing asked for otherwise."""
    held = (known.state, known.tokens, known.request)
    return known.at_rest and held == (snapshot.state, snapshot.tokens, snapshot.request)
