"""Simulated servers for tests and programs: real HTTP on real ports, in a thread of their own.

    with SimulatedCluster(workers=2, mode="incremental", seed=7) as cluster:
        cluster.urls                                     # ["http://127.0.0.1:…", …]
        cluster[0].inject(Fault(FaultKind.CUT, after=5))
        cluster[1].kill()

A thread, so that asyncio, trio and plain synchronous tests use them alike. One event loop serves all workers of a
cluster; a brain must only be touched in that loop, which is what ``call`` is for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from adapters.sglang.simulator.brain import Brain
from adapters.sglang.simulator.faults import Fault
from adapters.sglang.simulator.settings import ServerSettings
from adapters.sglang.simulator.worker import Worker

_T = TypeVar("_T")
_DEADLINE = 30.0
"""Seconds for anything that a cluster's thread is asked to do."""


class SimulatedServer:
    """One server of a cluster, as seen from any other thread."""

    def __init__(self, worker: Worker, cluster: SimulatedCluster) -> None:
        self._worker = worker
        self._cluster = cluster

    @property
    def url(self) -> str:
        """Base URL, without a slash at the end."""
        return self._worker.url

    @property
    def port(self) -> int:
        """The port it listens on; kept over kill and restart."""
        return self._worker.port

    @property
    def brain(self) -> Brain:
        """The brain itself; read or change it through ``call`` while the server runs."""
        return self._worker.brain

    def call(self, function: Callable[[Brain], _T]) -> _T:
        """Run ``function(brain)`` in the server's loop, between two steps, and return what it returns."""

        async def inside() -> _T:
            result = function(self._worker.brain)
            if self._worker.pump is not None:
                self._worker.pump.nudge()
            return result

        return self._cluster.run(inside())

    def inject(self, *faults: Fault) -> None:
        """Add faults for requests that are still to come."""

        def add(brain: Brain) -> None:
            for fault in faults:
                brain.faults.add(fault)

        self.call(add)

    def wait_until(self, condition: Callable[[Brain], bool], timeout: float = 10.0) -> None:
        """Block until ``condition(brain)`` holds. Raises TimeoutError."""

        async def inside() -> None:
            async with asyncio.timeout(timeout):
                while not condition(self._worker.brain):  # noqa: ASYNC110 - any condition
                    await asyncio.sleep(0.002)

        self._cluster.run(inside())

    def kill(self) -> None:
        """Die as at SIGKILL: streams break in the middle, connections are refused."""
        self._cluster.run(self._worker.kill())

    def restart(self) -> None:
        """Come back on the same port, without memory."""
        self._cluster.run(self._worker.restart())


class SimulatedCluster:
    """``workers`` simulated servers with the same weights. A context manager; ``start`` and ``stop`` also work.

    Keyword arguments besides those named are fields of ``ServerSettings``. ``faults`` go to every worker.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        faults: Iterable[Fault] = (),
        host: str = "127.0.0.1",
        ports: Sequence[int] | None = None,
        interval: float | None = None,
        settings: ServerSettings | None = None,
        **fields: Any,
    ) -> None:
        if workers < 1:
            raise ValueError(f"a cluster has at least 1 worker, got {workers}")
        if settings is not None and fields:
            raise TypeError("give either settings or its fields, not both")
        self._settings = settings or ServerSettings(**fields)
        self._faults = tuple(faults)
        self._host, self._interval = host, interval
        self._ports = tuple(ports) if ports is not None else (0,) * workers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._workers: list[Worker] = []
        self.servers: list[SimulatedServer] = []

    @property
    def urls(self) -> list[str]:
        """Base URLs of the workers."""
        return [server.url for server in self.servers]

    def __getitem__(self, index: int) -> SimulatedServer:
        return self.servers[index]

    def start(self) -> Self:
        """Start all workers; returns when every one of them answers."""
        workers = [
            Worker(self._settings, self._faults, host=self._host, port=port, interval=self._interval)
            for port in self._ports
        ]
        self.servers = [SimulatedServer(worker, self) for worker in workers]
        self._workers = workers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="simulated-sglang", daemon=True)
        self._thread.start()

        async def start_all() -> None:
            await asyncio.gather(*(worker.start() for worker in workers))

        self.run(start_all())
        return self

    def _serve(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the cluster's loop and wait for its result."""
        if self._loop is None:
            coroutine.close()
            raise RuntimeError("the simulated cluster is not running")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_DEADLINE)

    def stop(self) -> None:
        """Stop all workers and their thread. Twice is fine."""
        if self._loop is None or self._thread is None:
            return

        async def stop_all() -> None:
            await asyncio.gather(*(worker.stop() for worker in self._workers))
            leftover = asyncio.all_tasks() - {asyncio.current_task()}
            for task in leftover:
                task.cancel()
            await asyncio.gather(*leftover, return_exceptions=True)

        self.run(stop_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_DEADLINE)
        self._loop = self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
