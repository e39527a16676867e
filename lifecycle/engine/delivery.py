"""Dispositions: durable first, then said, then the rollout leaves the registry."""

from __future__ import annotations

from collections.abc import Sequence

from lifecycle.engine.core import Core
from lifecycle.rollout import Rollout
from lifecycle.states import Disposition


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
    core.fence_lost()
    for rollout, disposition in moves:
        if rollout.id not in core.fenced:
            core.recorder.disposed(rollout)
            if disposition is not Disposition.CARRIED:
                core.retire(rollout)
