"""Clients against a server, each in a process of its own, in turn, several rounds; medians of what they took."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.rows import say

BASELINE = "baseline"
FLOOR = "floor"
FAST = "product:transport=auto"
PLAIN = "product:transport=httpx"
START_S = 120.0


class DifferentTokens(Exception):
    """Clients came back with different tokens: their times cannot be compared."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One set-up in which clients are compared. `rate` is in tokens per second and stream; None: unpaced."""

    name: str
    clients: Sequence[str]
    mode: str = "incremental"
    streams: int = 64
    tokens: int = 500
    rate: float | None = None
    rounds: int = 5


@dataclass(slots=True)
class Measured:
    """Medians by client: CPU microseconds per token of the client's process, and peak memory in bytes."""

    scenario: Scenario
    times: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, list[float]] = field(default_factory=dict)

    def cost(self, client: str) -> float:
        """CPU µs per token."""
        return statistics.median(self.times[client])

    def peak(self, client: str) -> float:
        """The most memory a process had, in bytes."""
        return statistics.median(self.peaks[client])

    def ratio(self, client: str, other: str) -> float:
        """How many times the cost of another."""
        return self.cost(client) / self.cost(other)

    def behind(self, client: str, other: str) -> str:
        """The figures of a ratio."""
        return f"{self.cost(client):.1f} ÷ {self.cost(other):.1f} µs"


@contextmanager
def server(*options: object) -> Iterator[list[str]]:
    """A server in another process; yields its URLs."""
    argv = [sys.executable, "-m", "benchmarks.server", *map(str, options)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(START_S)


def run_client(client: str, urls: Sequence[str], scenario: Scenario) -> dict[str, Any]:
    """One run: what `benchmarks.clients` prints."""
    name, _, option = client.partition(":")
    argv = [sys.executable, "-m", "benchmarks.clients", name]
    argv += [f"--url={url}" for url in urls]
    argv += [f"--streams={scenario.streams}", f"--tokens={scenario.tokens}"]
    argv += [f"--option={option}"] if option else []
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{client} failed in {scenario.name!r}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare(scenario: Scenario) -> Measured:
    """Run all clients in turn, `rounds` times. Raises DifferentTokens unless all ended with the same tokens."""
    measured = Measured(scenario)
    options: list[object] = ["--mode", scenario.mode, "--tokens", scenario.tokens]
    options += [] if scenario.rate is None else ["--rate", scenario.rate]
    digests: dict[str, str] = {}
    with server(*options) as urls:
        for number in range(scenario.rounds):
            for client in scenario.clients:
                found = run_client(client, urls, scenario)
                if client != FLOOR:  # the floor reads bytes to their end and has no tokens
                    digests[client] = found["digest"]
                cost = found["cpu_s"] * 1e6 / scenario.streams / scenario.tokens
                measured.times.setdefault(client, []).append(cost)
                measured.peaks.setdefault(client, []).append(found["peak_bytes"])
                say(
                    f"  {scenario.name}, round {number + 1}: {client} {cost:.1f} µs/token, {found['wall_s']:.1f} s"
                )
    if len(set(digests.values())) > 1:
        raise DifferentTokens(f"{scenario.name}: {digests}")
    return measured
