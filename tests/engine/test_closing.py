"""How an engine ends: in order, bounded, and also when the task it lives in is cancelled by somebody else."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from lifecycle.errors import StoreUnavailable
from lifecycle.log.records import EngineStopped
from lifecycle.states import Outcome, Reason, RolloutState
from lifecycle.stores import MemoryStore
from lifecycle.testing.backend import Hang, Pause, ScriptedBackend, finish, tokens
from lifecycle.testing.clock import run_virtual
from tests.support.driving import Lines, engine_on, group, request, simple, until

pytestmark = pytest.mark.anyio

HANGING = lambda _: [tokens(1), Hang()]  # noqa: E731  a script


async def test_leaving_the_block_brings_everything_to_rest() -> None:
    """What waits and what flies, with the reason shutdown; the last line has the ledger."""
    lines, backend, store = Lines(), ScriptedBackend(HANGING), MemoryStore()
    async with engine_on(backend, lines, store=store, max_in_flight=1) as engine:
        flying, waiting = engine.submit(request("a")), engine.submit(request("b"))
        await until(lambda: flying.state is RolloutState.PARTIAL)
    assert {flying.state, waiting.state} == {RolloutState.ABORTED}
    assert {flying.snapshot().reason, waiting.snapshot().reason} == {Reason.SHUTDOWN}
    assert backend.live == {}
    assert {row.id: (row.state, row.tokens) for row in store.pending()} == {
        "a": ("aborted", 1),
        "b": ("aborted", 0),
    }
    last = lines.all[-1]
    assert last[0] == "engine.stopped"
    assert last[1]["states"] == {"resumable": 2}
    assert last[1]["ledger"]["balanced"]


async def test_closing_is_bounded_when_the_server_is_deaf() -> None:
    """After close_timeout the streams are closed."""
    backend = ScriptedBackend(HANGING)
    backend.deaf = True
    async with engine_on(backend, close_timeout=7.0) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        began = anyio.current_time()
    assert anyio.current_time() - began == pytest.approx(7.0, abs=0.01)
    assert handle.state is RolloutState.ABORTED
    assert backend.live == {}


async def test_closing_brings_the_deadline_of_a_running_abort_forward() -> None:
    """Also where an abort waits for servers that are paused."""
    backend = ScriptedBackend(HANGING)
    backend.deaf = True
    async with engine_on(backend, close_timeout=2.0) as engine, anyio.create_task_group() as tasks:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        async with engine.weight_update("2", "in_place"):
            tasks.start_soon(handle.abort)
            await anyio.sleep(100)
            assert handle.state is RolloutState.ABORTING
            began = anyio.current_time()
            await engine.close()
            assert anyio.current_time() - began <= 2.01
        assert handle.state is RolloutState.ABORTED
        assert engine.stats().gate == "closed"


async def test_the_callers_exception_leaves_the_block_as_it_is() -> None:
    """Not in a group, and after everything has come to rest."""
    backend = ScriptedBackend(HANGING)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with engine_on(backend) as engine:
            handle = engine.submit(request())
            await until(lambda: handle.state is RolloutState.PARTIAL)
            raise ZeroDivisionError
    assert handle.state is RolloutState.ABORTED


@pytest.mark.parametrize("deaf", [False, True])
async def test_a_foreign_cancellation_tells_the_server_and_goes_on(deaf: bool) -> None:
    """The scope around the engine is cancelled: aborts are sent, shielded and bounded, then it goes on."""
    lines, backend = Lines(), ScriptedBackend(HANGING)
    backend.deaf = deaf
    with anyio.CancelScope() as scope:
        async with engine_on(backend, lines, close_timeout=5.0) as engine:
            engine.submit(request("a"))
            engine.submit(request("t", text="words"))
            await until(lambda: len(engine.core.flights) == 2)
            began = anyio.current_time()
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert len(backend.aborted) >= 2
    assert anyio.current_time() - began <= 5.01
    assert backend.live == {}
    assert lines.of(EngineStopped)[0]["states"] == {"resumable": 2}


async def test_a_foreign_cancellation_during_a_collect_carries_and_closes() -> None:
    """Both clean up in order, and nothing hangs."""
    lines, backend, store = Lines(), ScriptedBackend(HANGING), MemoryStore()
    with anyio.move_on_after(5) as scope:
        async with engine_on(backend, lines, store=store) as engine:
            await engine.collect([group("a"), group("b")])
    assert scope.cancelled_caught
    assert {row.disposition for row in store.pending()} == {"carried"}
    assert lines.of(EngineStopped)[0]["ledger"]["balanced"]


async def test_closing_twice_does_nothing() -> None:
    """One last line."""
    lines = Lines()
    async with engine_on(ScriptedBackend(simple(1)), lines) as engine:
        await engine.close(Reason.CANCELLED)
        await engine.close()
    assert [line["reason"] for line in lines.of(EngineStopped)] == ["cancelled"]


async def test_a_store_that_cannot_save_is_told_after_the_tasks_have_ended() -> None:
    """StoreUnavailable leaves the block; nothing is left running."""

    class Stuck(MemoryStore):
        def release(self, owner: str) -> None:
            raise StoreUnavailable("disk full")

    lines, backend = Lines(), ScriptedBackend(HANGING)
    with pytest.raises(StoreUnavailable, match="disk full"):  # noqa: PT012
        async with engine_on(backend, lines, store=Stuck()) as engine:
            handle = engine.submit(request())
            await until(lambda: handle.state is RolloutState.PARTIAL)
    assert backend.live == {}
    assert lines.all[-1][0] == "engine.stopped"


async def test_our_own_bug_in_a_task_ends_the_engine_in_order() -> None:
    """The exception comes out, after the others were told and have come to rest."""
    backend = ScriptedBackend(HANGING)
    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: PT012
        async with engine_on(backend, close_timeout=3.0) as engine:
            handle = engine.submit(request("good"))
            await until(lambda: handle.state is RolloutState.PARTIAL)

            works = engine.core.ended

            def broken(*_: object) -> None:
                engine.core.ended = works  # type: ignore[method-assign]
                raise AssertionError("a bug")

            backend.script = lambda _: [tokens(1), finish()]
            engine.core.ended = broken  # type: ignore[method-assign]
            engine.submit(request("bad"))
            await anyio.sleep(100)
    assert "a bug" in repr(caught.value.exceptions)
    assert handle.snapshot().outcome is Outcome.CONFIRMED


def test_a_cancelled_asyncio_task_stays_cancelled() -> None:
    """task.cancel() from a framework: the server is told, and the task ends cancelled."""
    backend = ScriptedBackend(HANGING)

    async def live() -> None:
        async with engine_on(backend) as engine:
            handle = engine.submit(request())
            await until(lambda: handle.state is RolloutState.PARTIAL)
            await asyncio.sleep(1000)

    async def main() -> bool:
        task = asyncio.create_task(live())
        await asyncio.sleep(5)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert run_virtual(main)
    assert len(backend.aborted) == 1
    assert backend.live == {}


def test_an_asyncio_timeout_around_the_engine_is_a_timeout() -> None:
    """asyncio.timeout() counts cancellations: none is swallowed, none is added."""
    backend = ScriptedBackend(lambda _: [tokens(1), Pause(100), finish()])

    async def main() -> None:
        async with asyncio.timeout(3):
            async with engine_on(backend) as engine:
                await engine.generate(request())

    with pytest.raises(TimeoutError):
        run_virtual(main)
    assert len(backend.aborted) == 1
