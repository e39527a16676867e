"""What the store has to tell, and dispositions: durable first, then said, then the rollout leaves the registry."""

from __future__ import annotations

from collections.abc import Sequence

from lifecycle.engine.core import Core
from lifecycle.rollout import Rollout
from lifecycle.states import Disposition


def hear_store(core: Core) -> None:
    """Fence what another owner has taken over, and say which writes the store refused for good."""
    storage = core.recorder.storage
    for rollout_id in storage.take_fenced():
        if rollout_id in core.rollouts:
            core.fence(core.rollouts[rollout_id])
    for rollout_id, error in storage.take_errors():
        core.recorder.refused(rollout_id, core.rollouts.get(rollout_id), error)


async def deliver(core: Core, moves: Sequence[tuple[Rollout, Disposition]]) -> None:
    """Write down what becomes of rollouts at rest. If that fails or is cancelled, nothing has become of them."""
    before = [(rollout, rollout.disposition) for rollout, _ in moves]
    for rollout, disposition in moves:
        core.recorder.mark(rollout, disposition)
    try:
        await core.recorder.storage.durable()
    except BaseException:
        for rollout, disposition in before:
            core.recorder.mark(rollout, disposition)
        raise
    hear_store(core)
    for rollout, disposition in moves:
        if not rollout.fenced:
            core.recorder.disposed(rollout)
            if disposition is not Disposition.CARRIED:
                core.retire(rollout)
