"""Settings of the backend, checked before anything is opened."""

from __future__ import annotations

import asyncio
import math
import resource
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

import httpx

from adapters.sglang.aborting import Strategy
from adapters.sglang.transport import DEFAULT_IN_FLIGHT, HttpxTransport, Transport, check_client
from lifecycle.errors import ConfigurationError

TRANSPORTS = ("auto", "fast", "httpx")
CHOICES = (Strategy.AUTO, Strategy.FANOUT, Strategy.CLOSE)
Number = TypeVar("Number", int, float)
SPARE_FILES = 64
"""File descriptors left for everything that is not a stream."""


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Which transport, and how it is set up. Raises ConfigurationError for values that cannot be used."""

    name: str
    max_connections: int | None
    connect_timeout: float
    client: httpx.AsyncClient | None

    def __post_init__(self) -> None:
        if self.name not in TRANSPORTS:
            raise ConfigurationError(f"transport must be one of {', '.join(TRANSPORTS)}, not {self.name!r}")
        if self.client is not None and self.name == "fast":
            raise ConfigurationError("client= is an httpx client: it cannot be used with transport='fast'")
        if self.max_connections is not None and not (
            type(self.max_connections) is int and self.max_connections > 0
        ):
            raise ConfigurationError(
                f"max_connections must be at least 1 or None, not {self.max_connections!r}"
            )
        positive("connect_timeout", self.connect_timeout)
        if self.client is not None:
            check_client(self.client, self.max_connections or DEFAULT_IN_FLIGHT)

    def build(self) -> tuple[Transport, Transport]:
        """One transport for streams and one for control calls, for the event loop that runs now."""
        check_files(self.max_connections)
        if self._fast():
            from adapters.sglang.transport_fast import FastTransport  # noqa: PLC0415  (an extra)

            timeout = self.connect_timeout
            return FastTransport(connect_timeout=timeout), FastTransport(connect_timeout=timeout)
        streams = HttpxTransport(connect_timeout=self.connect_timeout, client=self.client)
        return streams, HttpxTransport(connect_timeout=self.connect_timeout)

    def _fast(self) -> bool:
        """Whether the fast transport is to be used. Raises ConfigurationError where it was asked for and cannot be."""
        if self.name == "httpx" or self.client is not None:
            return False
        problem = None
        if find_spec("httptools") is None:
            problem = "httptools is not installed: pip install 'rollout-lifecycle[fast]'"
        elif not on_asyncio():
            problem = "it runs on asyncio only: use transport='httpx' here"
        if problem is not None and self.name == "fast":
            raise ConfigurationError(f"transport='fast': {problem}")
        return problem is None


def on_asyncio() -> bool:
    """Whether the calling task is an asyncio task."""
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


def check_files(max_connections: int | None) -> None:
    """Refuse more streams than this process may open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_connections is None or soft == resource.RLIM_INFINITY or max_connections + SPARE_FILES <= soft:
        return
    raise ConfigurationError(
        f"max_connections={max_connections} needs about {max_connections + SPARE_FILES} open files, and this process "
        f"may open {soft}: raise the limit (ulimit -n {max_connections + SPARE_FILES}) or lower max_connections"
    )


def checked_strategy(strategy: str) -> Strategy:
    """The abort strategy of that name. Raises ConfigurationError."""
    if strategy not in CHOICES:
        raise ConfigurationError(f"strategy must be one of {', '.join(CHOICES)}, not {str(strategy)!r}")
    return Strategy(strategy)


def positive(name: str, value: Number) -> Number:
    """`value`, if it is a finite number above 0. Raises ConfigurationError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigurationError(f"{name} must be a number above 0, not {value!r}")
    return value
