"""What drives a brain in real time: one task that steps the scheduler at its pace, and wakes whoever reads.

One task serves all streams of a server. With nothing to do it sleeps until it is nudged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from adapters.sglang.simulator.brain import Brain

_IDLE_PAUSE = 0.005
"""Seconds between steps that can make no token (everything stalled): waiting costs no core."""


class Pump:
    """Steps ``brain`` every ``interval`` seconds while it is busy; 0 steps as fast as the readers allow."""

    def __init__(self, brain: Brain, interval: float | None = None) -> None:
        self.brain = brain
        rate = brain.settings.tokens_per_second
        self.interval = interval if interval is not None else (1 / rate if rate else 0.0)
        self._work = asyncio.Event()
        self._stepped: set[asyncio.Event] = set()

    @staticmethod
    def wall_clock() -> float:
        """Seconds since the epoch: the clock of the time stamps on the wire."""
        return time.time()

    def nudge(self) -> None:
        """Something changed: there may be work."""
        self._work.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; looked at after every step."""
        stepped = asyncio.Event()
        self._stepped.add(stepped)
        try:
            while not condition():
                stepped.clear()
                await stepped.wait()
        finally:
            self._stepped.discard(stepped)

    async def run(self) -> None:
        """Step for ever; cancel it to stop."""
        due = 0.0
        while True:
            if not self.brain.busy:
                self._work.clear()
                await self._work.wait()
                continue
            made = self.brain.step()
            for waiter in tuple(self._stepped):
                waiter.set()
            if self.interval == 0:
                await asyncio.sleep(0 if made else _IDLE_PAUSE)
                continue
            # Keep the rate over many steps, but never try to make up for a long interruption.
            now = time.monotonic()
            due = max(due + self.interval, now - self.interval)
            await asyncio.sleep(max(0.0, due - now))
