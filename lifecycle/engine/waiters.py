"""Who waits for news of a rollout. Events are made only when somebody waits."""

from __future__ import annotations

import anyio

from lifecycle.rollout import Rollout


class Waiters:
    """One-shot events per rollout: for its next rest, and for its next news of any kind."""

    def __init__(self) -> None:
        self._rest: dict[str, anyio.Event] = {}
        self._news: dict[str, list[anyio.Event]] = {}

    @property
    def anybody_watches(self) -> bool:
        """Whether `news` would wake anybody: asked once per socket read."""
        return bool(self._news)

    def rest_event(self, rollout: Rollout) -> anyio.Event:
        """An event that is set when the rollout comes to rest the next time."""
        return self._rest.setdefault(rollout.id, anyio.Event())

    def watch(self, rollout: Rollout) -> anyio.Event:
        """An event that is set at the next news of a rollout; one event stands for any number of reads."""
        event = anyio.Event()
        self._news.setdefault(rollout.id, []).append(event)
        return event

    def rested(self, rollout: Rollout) -> None:
        """Wake who waits for the rest, and who waits for news."""
        event = self._rest.pop(rollout.id, None)
        if event is not None:
            event.set()
        self.news(rollout)

    def news(self, rollout: Rollout) -> None:
        """Wake who waits for news."""
        for event in self._news.pop(rollout.id, ()):
            event.set()
