"""Where the servers under contract come from: the simulator, or servers that ``CONTRACT_SERVERS`` names.

The live tests bring a third provider: real servers that they start themselves (``tests/live/plugin.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pytest

from adapters.sglang.simulator import SimulatedCluster
from tests.support.router import RouterProcess

LIVE_PLUGIN = "tests.live.plugin"
MODES = ("cumulative", "incremental")


@dataclass(frozen=True)
class Doomed:
    """A worker that a test may kill."""

    url: str
    kill: Callable[[], None]


class Provider(Protocol):
    """One server in each stream mode that stays up for the whole run, routers over them, and more to be killed."""

    name: str
    second: int
    """Tokens that take a server about a second."""

    def worker(self, mode: str) -> str:
        """The URL of the server in this mode."""
        ...

    def router(self, workers: Sequence[str]) -> str:
        """The URL of a router over these workers, started when first asked for."""
        ...

    def doomed(self, modes: Sequence[str]) -> AbstractContextManager[list[Doomed]]:
        """Fresh workers, ready, of the same model; routers over them are stopped with them."""
        ...


class Simulated:
    """Simulated servers, and real routers over them."""

    name = "simulator"
    second = 200
    settings: ClassVar[dict[str, Any]] = {
        "tokens_per_second": 4 * second,
        "seed": 11,
        "late_abort_delay": 0.2,
        "max_running_requests": 8,
    }

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._clusters: dict[str, SimulatedCluster] = {}
        self._routers: dict[tuple[str, ...], str] = {}

    def worker(self, mode: str) -> str:
        """The URL of the server in this mode."""
        if mode not in self._clusters:
            self._clusters[mode] = self._stack.enter_context(SimulatedCluster(mode=mode, **self.settings))
        return self._clusters[mode][0].url

    def router(self, workers: Sequence[str]) -> str:
        """A real router over these workers."""
        key = tuple(workers)
        if key not in self._routers:
            self._routers[key] = self._stack.enter_context(RouterProcess(key)).url
        return self._routers[key]

    @contextmanager
    def doomed(self, modes: Sequence[str]) -> Iterator[list[Doomed]]:
        """Fresh simulated workers."""
        with ExitStack() as stack:
            servers = [stack.enter_context(SimulatedCluster(mode=mode, **self.settings))[0] for mode in modes]
            yield [Doomed(server.url, server.kill) for server in servers]


class Named:
    """Servers that run already; ``CONTRACT_SERVERS="cumulative=http://…,incremental=http://…"``."""

    name = "named"
    second = 500

    def __init__(self, stack: ExitStack, urls: dict[str, str]) -> None:
        self._stack = stack
        self._urls = urls
        self._routers: dict[tuple[str, ...], str] = {}

    def worker(self, mode: str) -> str:
        """The URL of the server in this mode."""
        if mode not in self._urls:
            pytest.skip(f"CONTRACT_SERVERS names no {mode} server")
        return self._urls[mode]

    router = Simulated.router

    @contextmanager
    def doomed(self, modes: Sequence[str]) -> Iterator[list[Doomed]]:
        """None can be had."""
        pytest.skip(f"servers of CONTRACT_SERVERS are not killed ({', '.join(modes)} wanted)")
        yield []


def simulated(config: pytest.Config) -> bool:
    """Whether this run has simulated servers, and not real ones."""
    return not named_servers() and not config.pluginmanager.hasplugin(LIVE_PLUGIN)


def named_servers() -> dict[str, str]:
    """The servers of ``CONTRACT_SERVERS`` by mode; empty where it is not set."""
    entries = filter(None, os.environ.get("CONTRACT_SERVERS", "").split(","))
    return {
        mode.strip(): url.strip().rstrip("/") for mode, _, url in (entry.partition("=") for entry in entries)
    }
