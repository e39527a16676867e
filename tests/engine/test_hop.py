"""Waiting in a loop for what another thread does."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import anyio
import pytest

from lifecycle.engine.hop import outcome
from lifecycle.testing.clock import BACKENDS


@pytest.mark.anyio
async def test_what_a_thread_gives_or_raises() -> None:
    """Both come back to whoever waits; what is there already is there at once."""
    done: Future[int] = Future()
    done.set_result(1)
    assert await outcome(done) == 1
    given: Future[int] = Future()
    thread = threading.Timer(0.0, given.set_result, [2])
    thread.start()
    assert await outcome(given) == 2
    thread.join()
    refused: Future[int] = Future()
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            with pytest.raises(KeyError, match="no"):
                await outcome(refused)

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        refused.set_exception(KeyError("no"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_that_has_ended_meanwhile(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits there any more: the thread hears nothing of it."""
    late: Future[int] = Future()

    async def give_up() -> None:
        with anyio.move_on_after(0.001):
            await outcome(late)

    anyio.run(give_up, backend=backend)
    late.set_result(1)
    assert not caplog.records
