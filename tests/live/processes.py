"""Start a real SGLang server or router, wait until it is ready, and stop exactly what was started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from tests.live.environment import MODEL, Environment

Mode = Literal["cumulative", "incremental"]

SERVER_DEADLINE = 240.0
"""Seconds for a server to be ready: 20 alone on two cores, more when several start at once."""
ROUTER_DEADLINE = 60.0
STOP_DEADLINE = 10.0
HIGHEST_PORT = 55535
READY = "The server is fired up and ready to roll!"
SUPERVISE = Path(__file__).with_name("supervise.py")

SERVER_OPTIONS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--dtype=float32",
    "--grammar-backend=none",
    "--mem-fraction-static=0.1",
    "--max-total-tokens=65536",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--sleep-on-idle",
    "--random-seed=0",
)


class NotReady(Exception):
    """A process ended, or was not ready by its deadline; the message has the end of its log."""


@dataclass
class Running:
    """One started process group. ``url`` is its base URL on the loopback interface."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    started_in: float = 0.0
    _gone: bool = field(default=False, init=False)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def log_tail(self, lines: int = 15) -> str:
        """The end of what it wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL to the whole group at once, as a machine that loses power."""
        if self._gone:
            return  # The number of the group may belong to somebody else by now.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._gone = True
        if self.process.stdin is not None:
            self.process.stdin.close()

    def stop(self) -> None:
        """Ask it to leave; SIGKILL to what is left of the group when it has, or after 10 s."""
        if self.alive:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_DEADLINE)
        self.kill()

    def get(self, path: str, *, timeout: float = 10.0) -> Any:
        """GET a JSON answer."""
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return json.load(answer)


@dataclass
class Server(Running):
    """A real SGLang server in one of the two stream modes."""

    mode: Mode = "cumulative"
    max_running: int = 8

    def loads(self) -> tuple[int, int]:
        """How many requests run and wait in the scheduler."""
        loads = self.get("/v1/loads")["loads"]
        return sum(load["num_running_reqs"] for load in loads), sum(
            load["num_waiting_reqs"] for load in loads
        )


@dataclass
class Router(Running):
    """The real sglang-router over some workers."""

    workers: tuple[Server, ...] = field(default=())


def start_server(
    environment: Environment,
    mode: Mode,
    logs: Path,
    *,
    name: str | None = None,
    max_running: int = 8,
    options: Sequence[str] = (),
) -> Server:
    """Start a server and return at once; ``wait_for_server`` says when it can be used."""
    port = _free_port()
    label = name or f"sglang-{mode}"
    command = [
        str(environment.python),
        "-m",
        "sglang.launch_server",
        f"--model-path={MODEL}",
        f"--served-model-name={MODEL}",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--max-running-requests={max_running}",
        *SERVER_OPTIONS,
        *(["--incremental-streaming-output"] if mode == "incremental" else []),
        *options,
    ]
    settings = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    log = logs / f"{label}-{port}.log"
    process = _spawn(command, log, settings=settings, directory=environment.models)
    return Server(
        name=label,
        url=f"http://127.0.0.1:{port}",
        log=log,
        process=process,
        mode=mode,
        max_running=max_running,
    )


def start_router(
    environment: Environment, workers: Sequence[Server], logs: Path, *, policy: str = "round_robin"
) -> Router:
    """Start the router over these workers and return at once; ``wait_for_router`` says when it can be used."""
    port, metrics = _free_port(), _free_port()
    command = [
        str(environment.python.with_name("smg")),
        "launch",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--prometheus-port={metrics}",
        f"--policy={policy}",
        "--worker-urls",
        *(worker.url for worker in workers),
    ]
    log = logs / f"router-{port}.log"
    process = _spawn(command, log, settings={}, directory=logs)
    return Router(
        name="router", url=f"http://127.0.0.1:{port}", log=log, process=process, workers=tuple(workers)
    )


def stop_all(running: Sequence[Running]) -> None:
    """Ask all of them to leave at once, then wait for each."""
    for one in running:
        if one.alive:
            one.process.terminate()
    for one in running:
        one.stop()


def wait_for_server(server: Server, deadline: float = SERVER_DEADLINE) -> None:
    """Wait for the line that SGLang writes after its own warm-up request: ``/health`` answers too early."""
    _wait(server, lambda: READY in server.log.read_text(errors="replace"), deadline)


def wait_for_router(router: Router, deadline: float = ROUTER_DEADLINE) -> None:
    """Wait until the router lists every worker as healthy."""

    def all_healthy() -> bool:
        try:
            workers = router.get("/workers", timeout=2.0)["workers"]
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return {w["url"] for w in workers if w["is_healthy"]} == {w.url for w in router.workers}

    _wait(router, all_healthy, deadline)


def _wait(running: Running, ready: Callable[[], bool], deadline: float) -> None:
    began = time.monotonic()
    while not ready():
        waited = time.monotonic() - began
        if not running.alive:
            state = f"ended with {running.process.returncode} after {waited:.0f} s"
        elif waited > deadline:
            state = f"was not ready after {waited:.0f} s"
        else:
            time.sleep(0.1)
            continue
        running.stop()
        raise NotReady(
            f"{running.name} at {running.url} {state}; the end of {running.log}:\n{running.log_tail()}"
        )
    running.started_in = time.monotonic() - began


def _spawn(
    command: list[str], log: Path, *, settings: Mapping[str, str], directory: Path
) -> subprocess.Popen[bytes]:
    sink: IO[bytes]
    with log.open("wb") as sink:
        return subprocess.Popen(
            [sys.executable, str(SUPERVISE), *command],
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={**os.environ, **settings},
            start_new_session=True,
        )


def _free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        # SGLang 0.5.15 derives a gRPC port, 10000 higher, and refuses one that does not exist.
        if port <= HIGHEST_PORT:
            return port
