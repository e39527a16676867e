"""Virtual time: sleeps and time-outs of a test take none of the real one, and always end in the same order.

For asyncio an event loop whose clock jumps to the next timer whenever nothing else is left to do; trio has its own
(`MockClock`). Both are reached through anyio's backend options, in a test or with `run_virtual`:

    @pytest.fixture(params=BACKENDS)
    def anyio_backend(request):
        return virtual_backend(request.param)
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, TypeVarTuple

import anyio

T = TypeVar("T")
Args = TypeVarTuple("Args")

BACKENDS = ("asyncio", "trio")
LONGEST_WAIT = 24 * 3600.0
"""What asyncio waits for at most in one go: also for a timer that never comes (`sleep_forever` sets one)."""
PATIENCE_SECONDS = 30.0
"""How long (in real time) a loop without any timer waits for a thread before it calls the test stuck."""


class _JumpingSelector(selectors.DefaultSelector):
    """Looks at real files without waiting, and turns the wait it was asked for into a jump of the clock."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        idle = timeout is None or timeout >= LONGEST_WAIT
        ready = super().select(PATIENCE_SECONDS if idle else 0)
        if not ready:
            if idle:
                raise RuntimeError(
                    "every task waits, no timer is set and no thread answers: this would take for ever"
                )
            self._jump(timeout or 0.0)
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An asyncio loop that starts at 0 seconds and never waits for a timer."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self._advance))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def _advance(self, seconds: float) -> None:
        self._now += max(0.0, seconds)


def virtual_backend(name: str) -> tuple[str, dict[str, Any]]:
    """(backend, options) for anyio: `asyncio` or `trio` under virtual time."""
    if name == "asyncio":
        return name, {"loop_factory": VirtualClockLoop}
    import trio.testing  # noqa: PLC0415  only who asks for trio needs it

    return name, {"clock": trio.testing.MockClock(autojump_threshold=0)}


def run_virtual(function: Callable[[*Args], Awaitable[T]], *args: *Args, backend: str = "asyncio") -> T:
    """Run an async function to its end under virtual time; returns what it returns."""
    name, options = virtual_backend(backend)
    return anyio.run(function, *args, backend=name, backend_options=options)
