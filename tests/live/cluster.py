"""Two real servers, one in each stream mode, and real routers over them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.live.environment import Environment
from tests.live.processes import (
    Mode,
    Router,
    Running,
    Server,
    start_router,
    start_server,
    stop_all,
    wait_for_router,
    wait_for_server,
)

IDLE_DEADLINE = 10.0
"""Seconds in which a server must have dropped everything that a test left: an abort takes one more step."""


@dataclass
class LiveCluster:
    """What the live tests run against. Everything in ``started`` is stopped at the end, in whatever way it ends."""

    environment: Environment
    logs: Path
    cumulative: Server
    incremental: Server
    started: list[Running] = field(default_factory=list)
    _routers: dict[tuple[str, ...], Router] = field(default_factory=dict)

    @property
    def servers(self) -> tuple[Server, ...]:
        """The two workers that live as long as the cluster."""
        return self.cumulative, self.incremental

    def server(self, mode: Mode) -> Server:
        """The worker in this stream mode."""
        return self.cumulative if mode == "cumulative" else self.incremental

    @property
    def router(self) -> Router:
        """A router over both workers; streams through it come in either mode."""
        return self.router_over(*self.servers)

    def router_over(self, *workers: Server) -> Router:
        """A router over exactly these workers, started at the first call and kept."""
        key = tuple(worker.url for worker in workers)
        if key not in self._routers:
            router = start_router(self.environment, workers, self.logs)
            self.started.append(router)
            wait_for_router(router)
            self._routers[key] = router
        return self._routers[key]

    def extra(
        self, modes: Sequence[Mode], *, max_running: int = 8, options: Sequence[str] = ()
    ) -> list[Server]:
        """Start more workers, all at once, to be killed or otherwise spoilt."""
        servers = [
            start_server(
                self.environment,
                mode,
                self.logs,
                name=f"extra-{mode}",
                max_running=max_running,
                options=options,
            )
            for mode in modes
        ]
        self.started.extend(servers)
        for server in servers:
            wait_for_server(server)
        return servers

    def drop(self, running: Sequence[Running]) -> None:
        """Stop these, and any router over them, before the end of the cluster."""
        urls = {one.url for one in running}
        over = [router for key, router in self._routers.items() if urls & set(key)]
        self._routers = {key: router for key, router in self._routers.items() if router not in over}
        gone = [*running, *over]
        stop_all(gone)
        self.started = [one for one in self.started if one not in gone]


@contextmanager
def live_cluster(environment: Environment, logs: Path) -> Iterator[LiveCluster]:
    """Start the two servers together, wait for both, and stop exactly what was started.

    Raises:
        NotReady: a server ended or took too long; the message has the end of its log.
    """
    cumulative = start_server(environment, "cumulative", logs)
    incremental = start_server(environment, "incremental", logs)
    cluster = LiveCluster(environment, logs, cumulative, incremental, [cumulative, incremental])
    try:
        for server in cluster.servers:
            wait_for_server(server)
        yield cluster
    finally:
        stop_all(cluster.started)


def leaked(servers: Sequence[Server], deadline: float = IDLE_DEADLINE) -> dict[str, tuple[int, int]]:
    """The servers that still run or queue requests at the deadline: ``{name: (running, waiting)}``."""
    until = time.monotonic() + deadline
    while True:
        busy = {one.name: loads for one in servers if one.alive and (loads := one.loads()) != (0, 0)}
        if not busy or time.monotonic() > until:
            return busy
        time.sleep(0.05)
