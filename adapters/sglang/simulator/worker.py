"""One simulated server on a real socket, inside the caller's event loop: brain, pump and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterable, Iterator

import uvicorn

from adapters.sglang.simulator.app import build_app
from adapters.sglang.simulator.brain import Brain
from adapters.sglang.simulator.faults import Fault
from adapters.sglang.simulator.pump import Pump
from adapters.sglang.simulator.settings import ServerSettings

LATE_ACCEPT_S = 0.05
"""Seconds after a death in which a connection may still come out of the listener's accept."""


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: whoever runs the loop decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening-ready TCP socket; port 0 takes a free one. Raises OSError where the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol must be named: asyncio sets TCP_NODELAY only then, and every chunk would wait 40 ms without.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Listening at once: a client that is told the address can connect before the loop is ready.
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


class Worker:
    """A server that can be started, killed and restarted on one port. All methods run in its event loop.

    The socket is bound when the worker is made, so ``url`` is known before anything runs.
    """

    def __init__(
        self,
        settings: ServerSettings,
        faults: Iterable[Fault] = (),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        interval: float | None = None,
    ) -> None:
        self._listener: socket.socket | None = bind(host, port)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self.brain = Brain(settings, faults, clock=time.time)
        self.brain.on_death = self._on_death
        self._interval = interval
        self._server: _Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._restarts: set[asyncio.Task[None]] = set()
        self.pump: Pump | None = None

    @property
    def url(self) -> str:
        """Base URL: ``http://host:port``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Serve; returns when the server answers."""
        listener = self._listener or bind(self.host, self.port)
        self._listener = None
        self.brain.revive()
        self.pump = Pump(self.brain, self._interval)
        config = uvicorn.Config(
            build_app(self.pump),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=75,
        )
        self._server = _Server(config)
        self._tasks = [
            asyncio.create_task(self._server.serve(sockets=[listener])),
            asyncio.create_task(self.pump.run()),
        ]
        while not self._server.started and not self._tasks[0].done():  # noqa: ASYNC110 - uvicorn
            await asyncio.sleep(0.001)
        if self._tasks[0].done():
            self._tasks[0].result()

    def _on_death(self, fault: Fault | None) -> None:
        """The brain died: so does everything a client could still talk to."""
        server = self._server
        if server is None:
            return
        loop = asyncio.get_running_loop()
        for listener in getattr(server, "servers", ()):
            for open_socket in listener.sockets:
                loop.remove_reader(open_socket)
            # A turn later: asyncio forgets a connection, and never closes it, whose listener is closed between its
            # accept and its first turn (CPython 3.11: `Server._attach` asserts, before the transport is registered).
            loop.call_soon(listener.close)
        self._drop_connections(server)
        # What was being accepted in this moment is registered a turn of the loop later.
        loop.call_later(LATE_ACCEPT_S, self._drop_connections, server)
        server.should_exit = server.force_exit = True
        if fault is not None and fault.restart is not None:
            task = loop.create_task(self._restart_after(fault.restart))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

    @staticmethod
    def _drop_connections(server: _Server) -> None:
        for connection in list(server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()

    async def _restart_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.restart()

    async def kill(self) -> None:
        """Die as a process does at SIGKILL: connections break, requests are forgotten, the port is closed."""
        self.brain.kill()
        await self._end_tasks()

    async def restart(self) -> None:
        """A new process at the same address, after ``kill`` or a DEATH fault."""
        await self._end_tasks()
        await self.start()

    async def stop(self) -> None:
        """Stop serving; open streams are cut."""
        for task in self._restarts:
            task.cancel()
        self.brain.kill()
        await self._end_tasks()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _end_tasks(self) -> None:
        if not self._tasks:
            return
        serving, pumping = self._tasks
        self._tasks = []
        pumping.cancel()
        await asyncio.gather(serving, pumping, return_exceptions=True)
