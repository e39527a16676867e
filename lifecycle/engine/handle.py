"""A caller's hold on one rollout."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from lifecycle.errors import Fenced
from lifecycle.rollout import Rollout
from lifecycle.snapshot import Snapshot, take
from lifecycle.states import FINAL_STATES, Disposition, Reason, RolloutState

if TYPE_CHECKING:
    from lifecycle.engine.engine import LifecycleEngine
    from lifecycle.engine.reports import AbortReport


class RolloutHandle:
    """Look at a rollout, wait for it, end it. Holding a handle costs nothing; dropping it abandons nothing."""

    __slots__ = ("_engine", "_rollout")

    def __init__(self, engine: LifecycleEngine, rollout: Rollout) -> None:
        self._engine = engine
        self._rollout = rollout

    def __repr__(self) -> str:
        """Id, state and tokens."""
        return f"<RolloutHandle {self.id!r} {self.state} {len(self._rollout.tokens)} tokens>"

    @property
    def id(self) -> str:
        """The caller's id."""
        return self._rollout.id

    @property
    def state(self) -> RolloutState:
        """The present state."""
        return self._rollout.state

    @property
    def rollout(self) -> Rollout:
        """The live record; to be read, not written."""
        return self._rollout

    @property
    def at_rest(self) -> bool:
        """Whether `wait` would return without waiting for a server."""
        return self._rollout.at_rest

    def snapshot(self) -> Snapshot:
        """What is held right now; changes nothing."""
        return take(self._rollout, self._engine.process_id)

    async def wait(self) -> Snapshot:
        """Wait until the rollout is at rest and, with a store, saved; returns what it came to.

        A final rollout counts as delivered to whoever waited for it, unless a running `collect` has it. Cancelling the wait abandons the wait, not the
        rollout. Raises Fenced when another owner has taken the rollout over.
        """
        core = self._engine.core
        while not self._rollout.at_rest:
            await core.waiters.rest_event(self._rollout).wait()
        await self._engine.deliver([(self._rollout, Disposition.DELIVERED)] if self._undelivered else [])
        if self._rollout.fenced:
            raise Fenced(self.id, self._rollout.epoch, self._rollout.epoch + 1)
        return self.snapshot()

    @property
    def _undelivered(self) -> bool:
        open_ends = {Disposition.NONE, Disposition.CARRIED}
        is_open = self.state in FINAL_STATES and self._rollout.disposition in open_ends
        return is_open and not self._engine.collects(self._rollout)

    async def updates(self) -> AsyncIterator[Snapshot]:
        """Snapshots as the rollout grows, the last one at rest; news that arrive meanwhile come as one."""
        core = self._engine.core
        shown = -1
        while True:
            event = core.waiters.watch(self._rollout)
            rested = self._rollout.at_rest
            if len(self._rollout.tokens) != shown or rested:
                shown = len(self._rollout.tokens)
                yield self.snapshot()
            if rested:
                return
            await event.wait()

    async def abort(
        self, *, reason: Reason | str = Reason.REQUESTED, timeout: float | None = None
    ) -> AbortReport:
        """End it and wait until it is at rest; see `LifecycleEngine.abort`."""
        return await self._engine.abort([self], reason=reason, timeout=timeout)
