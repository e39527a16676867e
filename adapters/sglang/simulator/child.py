"""Start the simulator as a child process that never outlives its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

_GRACE = 5.0
"""Seconds that a child gets to stop by itself."""


class SimulatorProcess:
    """A running simulator in a session of its own. A context manager that stops it at the end.

    The child's standard input is a pipe whose other end only this process holds: when this process ends, by whatever
    means (SIGKILL too), the pipe ends and the child stops. A terminal's Ctrl-C does not reach it, so that the parent
    can still abort what is in flight while it shuts down.
    """

    def __init__(self, process: subprocess.Popen[bytes], urls: list[str]) -> None:
        self._process = process
        self.urls = urls
        """Base URLs of the workers."""

    @property
    def pid(self) -> int:
        """Process id of the child, which leads its own session."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the child is still there."""
        return self._process.poll() is None

    def stop(self) -> int:
        """Ask it to stop, wait, and make sure. Returns its exit status."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            return self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def launch(options: Sequence[str] = (), *, stderr: int | IO[bytes] | None = None) -> SimulatorProcess:
    """Run ``lifecycle sim`` with ``options`` as a child; returns when all its workers answer.

    Raises RuntimeError with the child's own words when it ends before that (a bad option, a port that is taken).
    """
    command = [sys.executable, "-m", "adapters.sglang.simulator", "--lifeline", "--json", *options]
    process = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=_environment(),
        start_new_session=True,
    )
    assert process.stdout is not None
    urls: list[str] = []
    expected = None
    while expected is None or len(urls) < expected:
        line = process.stdout.readline()
        if not line:
            simulator = SimulatorProcess(process, urls)
            raise RuntimeError(
                f"the simulator ended before it was ready, with exit status {simulator.stop()}"
            )
        report = msgspec.json.decode(line)
        expected = report["workers"]
        urls.append(report["url"])
    return SimulatorProcess(process, urls)


def _environment() -> dict[str, str]:
    """This environment, with the directory that ``adapters`` was imported from on the child's path."""
    root = str(Path(__file__).resolve().parents[3])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": root if not path else os.pathsep.join([root, path])}
