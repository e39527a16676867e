"""How a `StoreWriter` works, and the time it works by."""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Condition
from typing import Protocol

DEFAULT_TTL = 30.0


class WriterClock(Protocol):
    """Time as the writer sees it; a test brings its own."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch."""
        ...

    def wait(self, condition: Condition, timeout: float | None) -> None:
        """Wait on a condition that is held, at most `timeout` seconds."""
        ...


class SystemClock:
    """The real time."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def wait(self, condition: Condition, timeout: float | None) -> None:
        """Wait on a condition that is held, at most `timeout` seconds."""
        condition.wait(timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """How a writer works; times in seconds.

    `linger` is how long a first write waits for company, unless somebody waits for a flush. Leases last `ttl` and
    are renewed after a third of it. After a failure the same group is tried again after `retry_initial`, then twice
    as long each time up to `retry_max`. `admit` refuses from `max_operations` entries or `max_bytes` on. One group
    holds at most `group_operations` entries and about `group_bytes`.
    """

    ttl: float = DEFAULT_TTL
    linger: float = 0.05
    retry_initial: float = 0.1
    retry_max: float = 5.0
    max_operations: int = 16_384
    max_bytes: int = 512 * 1024 * 1024
    group_operations: int = 2048
    group_bytes: int = 64 * 1024 * 1024


DEFAULT_SETTINGS = WriterSettings()
