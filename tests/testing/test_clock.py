"""Virtual time: what takes long takes nothing, and what would take for ever says so."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from lifecycle.engine.hop import outcome
from lifecycle.testing import clock
from lifecycle.testing.backend import Hang, ScriptedBackend, tokens
from lifecycle.testing.clock import BACKENDS, run_virtual


@pytest.mark.parametrize("backend", BACKENDS)
def test_sleeps_take_virtual_time_only(backend: str) -> None:
    """And end in the order of their deadlines."""
    order: list[float] = []

    async def sleeper(seconds: float) -> None:
        await anyio.sleep(seconds)
        order.append(seconds)

    async def main() -> float:
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for seconds in (3000.0, 10.0, 200.0):
                tasks.start_soon(sleeper, seconds)
            with anyio.move_on_after(50) as scope:
                await anyio.sleep_forever()
            assert scope.cancelled_caught
        return anyio.current_time() - began

    real = time.monotonic()
    assert run_virtual(main, backend=backend) == pytest.approx(3000, abs=0.01)
    assert time.monotonic() - real < 30
    assert order == [10.0, 200.0, 3000.0]


def test_a_thread_is_waited_for_when_there_is_no_timer() -> None:
    """Real work in a thread ends by itself."""

    async def main() -> int:
        return await anyio.to_thread.run_sync(lambda: 7)

    assert run_virtual(main) == 7


def test_waiting_for_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is stuck says so at once."""
    monkeypatch.setattr(clock, "PATIENCE_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="this would take for ever"):
        run_virtual(anyio.sleep_forever)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_trio", [True, False])
def test_a_future_of_another_thread_comes_back_into_the_loop(
    backend: str, with_trio: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On either loop, whether or not trio is around."""
    if backend == "trio" and not with_trio:
        return
    if not with_trio:
        monkeypatch.delitem(sys.modules, "trio", raising=False)
    future: Future[int] = Future()

    async def main() -> tuple[int, int]:
        threading.Timer(0.01, future.set_result, [5]).start()
        return await outcome(future), await outcome(future)

    assert anyio.run(main, backend=backend) == (5, 5)


def test_a_future_whose_waiter_is_gone_harms_nobody() -> None:
    """The loop has ended before the answer came."""
    future: Future[int] = Future()

    async def main() -> None:
        with anyio.move_on_after(0.01):
            await outcome(future)

    anyio.run(main)
    future.set_result(3)


def test_a_script_without_an_end_is_a_lost_stream() -> None:
    """The scripted backend cuts it off; one that hangs for ever stays silent until it is closed."""

    async def main() -> list[str]:
        backend = ScriptedBackend(lambda _: [tokens(1)])
        call = type("Call", (), {"rid": "r", "rollout_id": "a"})()
        kinds = [type(event).__name__ async for batch in backend.stream(call) for event in batch]
        backend.script = lambda _: [Hang(None)]
        with anyio.move_on_after(100) as scope:
            async for _ in backend.stream(call):
                raise AssertionError("it says nothing")
        assert scope.cancelled_caught
        return kinds

    assert run_virtual(main) == ["TokenSlice", "StreamEnd"]
