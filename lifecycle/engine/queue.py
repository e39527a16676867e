"""Which pending rollout is dispatched next: carried too often, then restored, then fresh; each first come, first served."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TypeVar

from lifecycle.rollout import Rollout

Entry = tuple[int, int, Rollout]
H = TypeVar("H", bound=tuple[float, int, Rollout])


def priority(rollout: Rollout) -> int:
    """0 for the starved, 1 for those that were begun, 2 for the rest."""
    if rollout.carries >= rollout.policy.max_carries:
        return 0
    return 1 if rollout.attempt > 0 or rollout.tokens else 2


class ReadyQueue:
    """A heap of what may go now and a heap of what must wait; entries that were dropped are passed over."""

    def __init__(self) -> None:
        self._order = count()
        self._valid: dict[str, int] = {}
        self._ready: list[Entry] = []
        self._waiting: list[tuple[float, int, Rollout]] = []

    def __len__(self) -> int:
        """How many rollouts are queued."""
        return len(self._valid)

    def __contains__(self, rollout_id: str) -> bool:
        """Whether a rollout is queued."""
        return rollout_id in self._valid

    @property
    def waiting(self) -> int:
        """How many of them back off."""
        return sum(self._valid.get(rollout.id) == order for _, order, rollout in self._waiting)

    def push(self, rollout: Rollout, due: float | None) -> None:
        """Queue a rollout, from `due` (monotonic seconds) on, or at once."""
        order = next(self._order)
        self._valid[rollout.id] = order
        if due is None:
            heappush(self._ready, (priority(rollout), order, rollout))
        else:
            heappush(self._waiting, (due, order, rollout))

    def drop(self, rollout: Rollout) -> None:
        """Forget a rollout; it need not be queued."""
        self._valid.pop(rollout.id, None)

    def pop(self, now: float) -> Rollout | None:
        """The next rollout to dispatch, None if none may go yet."""
        while self._waiting and self._waiting[0][0] <= now:
            _, order, rollout = heappop(self._waiting)
            if self._valid.get(rollout.id) == order:
                heappush(self._ready, (priority(rollout), order, rollout))
        while self._ready:
            _, order, rollout = heappop(self._ready)
            if self._valid.get(rollout.id) == order:
                del self._valid[rollout.id]
                return rollout
        return None

    def next_due(self) -> float | None:
        """When the next rollout may go (monotonic seconds, long ago if at once); None if none is queued."""
        if self._top(self._ready) is not None:
            return -inf
        waiting = self._top(self._waiting)
        return None if waiting is None else waiting[0]

    def _top(self, heap: list[H]) -> H | None:
        """The first entry that was not dropped."""
        while heap and self._valid.get(heap[0][2].id) != heap[0][1]:
            heappop(heap)
        return heap[0] if heap else None
