"""Simulated servers as a process of their own: what ``lifecycle sim`` runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

import msgspec

from adapters.sglang.simulator.faults import Fault
from adapters.sglang.simulator.settings import ServerSettings
from adapters.sglang.simulator.worker import Worker

_PARENT_CHECK = 1.0
"""Seconds between two looks at whether the parent is still there."""


ReadyLine = Callable[[int, list[Worker]], str]


def plain_line(index: int, crew: list[Worker]) -> str:
    """The line that a person reads."""
    worker = crew[index]
    settings = worker.brain.settings
    return f"simulated SGLang worker {index} ({settings.mode}, seed {settings.seed}) at {worker.url}"


def json_line(index: int, crew: list[Worker]) -> str:
    """The line that a launching program reads; it counts them."""
    report = {"worker": index, "workers": len(crew), "url": crew[index].url, "pid": os.getpid()}
    return msgspec.json.encode(report).decode()


def serve(
    settings: ServerSettings,
    *,
    workers: int = 1,
    host: str = "127.0.0.1",
    port: int = 0,
    faults: Sequence[Fault] = (),
    interval: float | None = None,
    die_with_parent: bool = False,
    lifeline: TextIO | None = None,
    ready_line: ReadyLine = plain_line,
    out: TextIO | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM and return 0. ``port`` is the first of consecutive ones; 0: free ones.

    One line per worker goes to ``out`` (stdout) once all of them answer. ``lifeline``: stop when this file ends, as
    a pipe does whose other end a parent holds, however that parent dies. Raises OSError where a port is taken.
    """
    ports = [port + index if port else 0 for index in range(workers)]
    crew = [Worker(settings, faults, host=host, port=number, interval=interval) for number in ports]
    return asyncio.run(_serve(crew, die_with_parent, lifeline, ready_line, out or sys.stdout))


async def _serve(
    crew: list[Worker],
    die_with_parent: bool,
    lifeline: TextIO | None,
    ready_line: ReadyLine,
    out: TextIO,
) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if lifeline is not None:
        loop.add_reader(lifeline.fileno(), _read_lifeline, lifeline.fileno(), stop)
    watch = asyncio.create_task(_watch_parent(os.getppid(), stop)) if die_with_parent else None
    try:
        await asyncio.gather(*(worker.start() for worker in crew))
        for index in range(len(crew)):
            print(ready_line(index, crew), file=out, flush=True)
        await stop.wait()
    finally:
        if lifeline is not None:
            loop.remove_reader(lifeline.fileno())
        if watch is not None:
            watch.cancel()
        await asyncio.gather(*(worker.stop() for worker in crew))
    return 0


def _read_lifeline(descriptor: int, stop: asyncio.Event) -> None:
    """Whatever is written to the lifeline means nothing; its end means stop."""
    if not os.read(descriptor, 4096):
        asyncio.get_running_loop().remove_reader(descriptor)
        stop.set()


async def _watch_parent(parent: int, stop: asyncio.Event) -> None:
    """Set ``stop`` when this process is handed to another parent: its own has died."""
    while os.getppid() == parent:  # noqa: ASYNC110 - no event exists for it
        await asyncio.sleep(_PARENT_CHECK)
    stop.set()
