"""A clock that moves when told to, and a store that stands still or fails when told to."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition, Event
from typing import Any

from lifecycle.stores import MemoryStore, StoreWriter

PATIENCE = 30.0
"""Seconds after which a test that waits for another thread has failed."""


class StepClock:
    """Time for a `StoreWriter`: its thread waits until something is handed in or `advance` is called."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float | None] = []
        self._idle = Condition()
        self._waits = 0
        self._conditions: set[Condition] = set()

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def wall(self) -> float:
        """Seconds since the epoch."""
        return self.now + 1_000_000

    def wait(self, condition: Condition, timeout: float | None) -> None:
        """Wait until notified, whatever the timeout."""
        self.pauses.append(timeout)
        self._conditions.add(condition)
        with self._idle:
            self._waits += 1
            self._idle.notify_all()
        condition.wait(PATIENCE)

    def advance(self, seconds: float) -> None:
        """Let time pass and wake the thread; returns when it has done what was due, and waits again."""
        self.settle()
        (condition,) = self._conditions
        with condition:
            before = self._waits
            self.now += seconds
            condition.notify_all()
        self.settle(before + 1)

    def settle(self, waits: int = 1) -> None:
        """Wait until the thread has begun to wait so many times."""
        with self._idle:
            assert self._idle.wait_for(lambda: self._waits >= waits, PATIENCE)


class FaultyStore(MemoryStore):
    """Blocks in `flush` while `gate` is closed; raises what `faults` holds for an operation, oldest first."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        super().__init__(**({} if clock is None else {"clock": clock}))
        self.gate = Event()
        self.gate.set()
        self.stalled = Event()
        self.faults: dict[str, list[BaseException]] = {}
        self.calls: list[str] = []
        self.before_flush: Callable[[], None] = lambda: None

    def fail(self, operation: str, *errors: BaseException) -> None:
        """The next calls of `operation` raise these."""
        self.faults.setdefault(operation, []).extend(errors)

    def _meet(self, operation: str) -> None:
        self.calls.append(operation)
        if self.faults.get(operation):
            raise self.faults[operation].pop(0)

    def put(self, *args: Any, **how: Any) -> None:
        """Perhaps store."""
        self._meet("put")
        super().put(*args, **how)

    def append(self, *args: Any) -> None:
        """Perhaps store."""
        self._meet("append")
        super().append(*args)

    def flush(self) -> None:
        """Perhaps flush, perhaps later."""
        self.before_flush()
        if not self.gate.is_set():
            self.stalled.set()
            assert self.gate.wait(PATIENCE)
        self._meet("flush")
        super().flush()

    def renew(self, owner: str, ttl: float) -> int:
        """Perhaps renew."""
        self._meet("renew")
        return super().renew(owner, ttl)

    def release(self, owner: str) -> None:
        """Perhaps release."""
        self._meet("release")
        super().release(owner)

    def new_epoch(self) -> int:
        """Perhaps an epoch."""
        self._meet("new_epoch")
        return super().new_epoch()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread brings about."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


def saved(writer: StoreWriter) -> None:
    """Wait until everything handed in is durable."""
    writer.flush().result(PATIENCE)
