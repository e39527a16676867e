"""One attempt in flight, as the engine watches it."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from lifecycle.call import CallRef
from lifecycle.rollout import Rollout


@dataclass(slots=True, eq=False)
class Flight:
    """One attempt in flight: the task's scope and the times its watchdogs look at (monotonic seconds)."""

    rollout: Rollout
    rid: str
    attempt: int
    progress_at: float
    saved_at: float
    saved_tokens: int
    probe: bool
    accepted: bool = False
    scope: anyio.CancelScope = field(default_factory=lambda: anyio.CancelScope(shield=True))

    @property
    def ref(self) -> CallRef:
        """What a backend knows it by."""
        return CallRef(self.rid, self.rollout.id, self.attempt)
