"""A backend that cannot be reached, as a state: when to try again, and when to stop hoping."""

from __future__ import annotations

from random import Random

from lifecycle.engine.settings import EngineSettings
from lifecycle.states import Reason

OUTAGE_REASONS = frozenset({Reason.UNREACHABLE, Reason.UNAVAILABLE, Reason.RATE_LIMITED})
"""Nobody accepted the request: not the request's fault, and the next one would fare no better."""


class Outage:
    """While it lasts, one probe at a time is let through; an accepted request ends it."""

    def __init__(self, settings: EngineSettings, random: Random) -> None:
        self._settings = settings
        self._random = random
        self.began: float | None = None
        self.retry_at = 0.0
        self.failures = 0
        self.probing = False

    @property
    def active(self) -> bool:
        """Whether the last word from the backend was a failure."""
        return self.began is not None

    def blocks(self, now: float) -> bool:
        """Whether a dispatch must wait."""
        return self.active and (self.probing or now < self.retry_at)

    def expired(self, now: float) -> bool:
        """Whether it has lasted longer than rollouts are kept waiting."""
        return self.began is not None and now - self.began >= self._settings.unreachable_timeout

    def failed(self, now: float) -> float | None:
        """A request was turned away. Returns the new back-off in seconds, None if one is already running."""
        if self.active and not self.probing:
            return None
        self.probing = False
        self.began = now if self.began is None else self.began
        longest = min(self._settings.outage_backoff_max, self._settings.outage_backoff * 2.0**self.failures)
        delay = longest * (0.5 + self._random.random() / 2)
        left = self.began + self._settings.unreachable_timeout - now
        if 0 < left < delay:
            delay = left  # the last probe before rollouts are let go is made when the time is up
        self.failures = min(self.failures + 1, 62)
        self.retry_at = now + delay
        return delay

    def accepted(self, now: float) -> float | None:
        """A request was accepted. Returns how long the outage had lasted, None if there was none."""
        if self.began is None:
            return None
        lasted = now - self.began
        self.began, self.failures, self.probing = None, 0, False
        return lasted

    def probe_ended(self) -> None:
        """The probe ended without an answer either way (aborted, expired): let another one through."""
        self.probing = False
