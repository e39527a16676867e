"""The engine's numbers, checked once, and the clock it reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import anyio

from lifecycle.errors import ConfigurationError


class Clock(Protocol):
    """Where the engine reads the time. Waiting always goes through the event loop's own clock."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for log lines."""
        ...


class LoopClock:
    """The event loop's clock for durations, the system's for dates: follows a virtual loop in tests."""

    def monotonic(self) -> float:
        """The loop's time. Asked on every read of every stream: anyio takes ten times as long to find the loop."""
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return anyio.current_time()

    def wall(self) -> float:
        """The system's time."""
        return time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """All times in seconds, all sizes in tokens.

    `abort_timeout` bounds an abort without a time-out of its own, and `close_timeout` the end of the engine.
    `abort_resend` is the first pause before an unanswered abort is sent again; it doubles up to `abort_resend_max`.
    After `unreachable_timeout` without any accepted request, rollouts come to rest as `unreachable`.
    A checkpoint is saved after `checkpoint_tokens` new tokens or `checkpoint_seconds`, whichever comes first.
    `lease_seconds` is how long a dead owner keeps its rollouts from others. While a store stands still, `submit` is
    refused once `backlog_rollouts` or `backlog_bytes` wait to be saved.
    """

    max_in_flight: int = 512
    abort_timeout: float = 30.0
    abort_resend: float = 0.5
    abort_resend_max: float = 5.0
    unreachable_timeout: float = 60.0
    outage_backoff: float = 0.2
    outage_backoff_max: float = 10.0
    close_timeout: float = 10.0
    update_timeout: float = 120.0
    control_timeout: float = 10.0
    checkpoint_tokens: int = 512
    checkpoint_seconds: float = 10.0
    lease_seconds: float = 60.0
    backlog_rollouts: int = 16_384
    backlog_bytes: int = 512 * 1024 * 1024
    flush_seconds: float = 1.0

    @classmethod
    def of(cls, settings: Mapping[str, Any], backend: object = None) -> EngineSettings:
        """Settings from keywords, for an engine on `backend`.

        Raises ConfigurationError that names an unknown one and lists the known, and where the backend has fewer
        connections than there may be rollouts in flight: the rest would wait for a connection, unseen, in flight.
        """
        unknown = settings.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise ConfigurationError(f"unknown setting {', '.join(sorted(unknown))}; settings are: {known}")
        made = cls(**settings)
        connections = getattr(backend, "max_connections", None)
        if connections is not None and connections < made.max_in_flight:
            raise ConfigurationError(
                f"max_in_flight={made.max_in_flight} needs as many connections: "
                f"the backend has max_connections={connections}"
            )
        return made

    def __post_init__(self) -> None:
        """Refuse numbers that cannot work, by name."""
        for name in ("max_in_flight", "checkpoint_tokens", "backlog_rollouts", "backlog_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"{name} must be a whole number from 1, not {value!r}")
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not isinstance(value, int | float) or value <= 0:
                raise ConfigurationError(f"{name} must be a number above 0, not {value!r}")
