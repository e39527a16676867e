"""A real sglang-router in a process of its own, in front of any workers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

START_S = 40.0


def router_command() -> str | None:
    """The router's program in this environment (wheel `sglang-router`), None where it is not installed."""
    return shutil.which("smg", path=str(Path(sys.executable).parent)) or shutil.which("smg")


class RouterProcess:
    """`smg launch` with `workers` behind it; ready when it lists them all as healthy."""

    def __init__(self, workers: Sequence[str], *arguments: str) -> None:
        self.workers = list(workers)
        self.arguments = arguments
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__)

    def __enter__(self) -> Self:
        command = router_command()
        assert command is not None, "sglang-router is not installed"
        port, metrics = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                *(
                    command,
                    "launch",
                    "--host",
                    "127.0.0.1",
                    "--port",
                    str(port),
                    "--worker-urls",
                    *self.workers,
                ),
                *("--policy", "round_robin", "--prometheus-port", str(metrics), "--log-level", "warn"),
                *("--worker-startup-check-interval", "1", *self.arguments),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # it would look for a tokenizer of the workers' model on the net
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": f"http://127.0.0.1:{metrics}"},
        )
        try:
            self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _wait(self) -> None:
        stop = time.monotonic() + START_S
        assert self._process is not None
        with httpx.Client(base_url=self.url, trust_env=False) as client:
            while self._process.poll() is None and time.monotonic() < stop:
                try:
                    ready = client.get("/readiness")
                    if ready.json().get("healthy_workers") == len(self.workers):
                        return
                except (httpx.TransportError, ValueError):
                    pass
                time.sleep(0.05)
        self._log.seek(0)
        raise RuntimeError(f"the router did not come up: {self._log.read()[-2000:].decode(errors='replace')}")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
