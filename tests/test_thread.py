from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest

from lifecycle import (
    ConfigurationError,
    EngineClosed,
    EngineThread,
    Outcome,
    Policy,
    Reason,
    RolloutRequest,
    RolloutState,
    Snapshot,
    SqliteStore,
    UpdateTimeout,
)
from lifecycle.call import Call
from lifecycle.testing.backend import Hang, ScriptedBackend, Step, finish, tokens
from lifecycle.thread import loop

LOOPS = ("asyncio", "trio")


def short(_: Call) -> list[Step]:
    """Three tokens and an end."""
    return [tokens(1, 2), tokens(3), finish()]


def endless(_: Call) -> list[Step]:
    """Two tokens, then silence until it is aborted."""
    return [tokens(1, 2), Hang()]


def thread_over(backend: ScriptedBackend, **settings: Any) -> EngineThread:
    """An engine thread over a scripted backend."""
    return EngineThread(lambda: nullcontext(backend), **settings)


def request(name: str | None = None, **fields: Any) -> RolloutRequest:
    """A small request."""
    names = {} if name is None else {"id": name}
    return RolloutRequest(**names, prompt_ids=[7], max_new_tokens=8, **fields)


def eventually(condition: Callable[[], bool]) -> None:
    """Poll until it holds."""
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit, "did not come true"
        time.sleep(0.002)


def held_tokens(handle: Any) -> Callable[[], bool]:
    """Whether the two tokens of `endless` have arrived."""
    return lambda: len(handle.snapshot().tokens) == 2


@pytest.mark.parametrize("loop", LOOPS)
def test_plain_code_submits_waits_and_reads_the_books(loop: str) -> None:
    """A trainer without an event loop gets whole rollouts, numbers and a balanced ledger."""
    with thread_over(ScriptedBackend(short), loop=loop, version="7") as engine:
        handle = engine.submit(request("a"))
        assert list(handle.wait(timeout=10).tokens) == [1, 2, 3]
        assert handle.at_rest
        assert handle.state is RolloutState.COMPLETED
        assert repr(handle) == "<ThreadHandle 'a' completed 3 tokens>"
        assert engine.generate(request("b")).final
        assert engine.ledger().balanced
        assert engine.stats().attempts == 2
        assert engine.version == "7"
        assert engine.process_id
        assert engine.run_id
        engine.step = 4
        assert engine.step == 4


def test_the_backend_lives_in_the_threads_own_loop() -> None:
    """The factory is called, entered and left in the engine's thread, once."""
    seen: list[str] = []

    @asynccontextmanager
    async def factory() -> AsyncIterator[ScriptedBackend]:
        seen.append(threading.current_thread().name)
        yield ScriptedBackend(short)
        seen.append(threading.current_thread().name)

    with EngineThread(factory, name="my-engine") as engine:
        engine.generate(request())
        assert seen == ["my-engine"]
    assert seen == ["my-engine", "my-engine"]
    assert "my-engine" not in {thread.name for thread in threading.enumerate()}


def test_many_threads_share_one_engine() -> None:
    """Calls from several threads at once all get their own rollout, and the books balance."""
    done: list[Snapshot] = []
    with thread_over(ScriptedBackend(short), max_in_flight=4) as engine:

        def work(number: int) -> None:
            done.extend(engine.generate(request(f"{number}-{turn}")) for turn in range(5))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({snapshot.id for snapshot in done}) == 40
        assert engine.ledger().balanced
        assert engine.ledger().rollouts["delivered"] == 40


def test_a_wait_that_times_out_leaves_the_rollout_alone() -> None:
    """After a TimeoutError the rollout still runs, and can be looked at, waited for and aborted."""
    with thread_over(ScriptedBackend(endless)) as engine:
        handle = engine.submit(request("a"))
        eventually(held_tokens(handle))
        with pytest.raises(TimeoutError, match=r"not done within 0\.01 s"):
            handle.wait(timeout=0.01)
        assert not handle.at_rest
        assert engine.places() == {"a": "in_flight"}
        assert engine.handle("a").state is RolloutState.PARTIAL
        assert handle.abort(reason="over-sampled").outcomes == {"a": Outcome.CONFIRMED}
        assert list(handle.wait().tokens) == [1, 2]
        engine.drain(timeout=10)
        engine.discard("a")
        assert engine.ledger().rollouts["discarded"] == 1


def test_abort_takes_handles_ids_groups_or_everything() -> None:
    """The scopes of `LifecycleEngine.abort` can be named from outside."""
    with thread_over(ScriptedBackend(endless)) as engine:
        handles = [engine.submit(request(name, group_id=name)) for name in "abcd"]
        for handle in handles:
            eventually(held_tokens(handle))
        assert set(engine.abort(handles[0]).outcomes) == {"a"}
        assert set(engine.abort(["b"]).outcomes) == {"b"}
        assert set(engine.abort(group="c").outcomes) == {"c"}
        assert set(engine.abort().outcomes) == {"d"}


def test_generate_is_tied_to_its_call() -> None:
    """A `generate` that times out aborts its rollout on the server and keeps the prefix."""
    backend = ScriptedBackend(endless)
    with thread_over(backend) as engine:
        with pytest.raises(TimeoutError):
            engine.generate(request("a"), timeout=0.05)
        eventually(lambda: engine.places() == {"a": "resumable"})
        assert len(backend.aborted) == 1
        assert list(engine.handle("a").snapshot().tokens) == [1, 2]


def test_handles_are_awaited_from_any_asyncio_loop() -> None:
    """Two event loops wait for rollouts of one engine; a cancelled await abandons the wait only."""
    with thread_over(ScriptedBackend(lambda call: short(call) if call.attempt == 1 else [])) as engine:

        async def await_some(numbers: range) -> list[int]:
            handles = [engine.submit(request(str(number))) for number in numbers]
            return [len((await handle).tokens) for handle in handles]

        results: list[list[int]] = []
        other = threading.Thread(target=lambda: results.append(asyncio.run(await_some(range(5, 10)))))
        other.start()
        results.append(asyncio.run(await_some(range(5))))
        other.join()
        assert results == [[3] * 5, [3] * 5]

    with thread_over(ScriptedBackend(endless)) as engine:
        handle = engine.submit(request("a"))

        async def give_up() -> None:
            async with asyncio.timeout(0.05):
                await handle

        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
        assert not handle.at_rest


@pytest.mark.parametrize("loop", LOOPS)
def test_weights_are_changed_in_a_plain_block(loop: str) -> None:
    """Inside the block nothing is in flight; after it the new label is known and partials have gone on."""
    backend = ScriptedBackend(
        lambda call: [tokens(1), Hang()] if call.attempt == 1 else [tokens(2), finish()]
    )
    with thread_over(backend, loop=loop) as engine:
        handle = engine.submit(request("a"))
        eventually(lambda: handle.state is RolloutState.PARTIAL)
        with engine.weight_update("8"):
            assert engine.stats().in_flight == 0
            assert engine.stats().gate == "paused"
        assert list(handle.wait(timeout=10).tokens) == [1, 2]
        assert engine.version == "8"
        assert backend.log == ["abort", "resume 8 True"]


@pytest.mark.parametrize("problem", [ValueError, KeyboardInterrupt])
def test_a_failed_update_leaves_the_gate_paused(problem: type[BaseException]) -> None:
    """What goes wrong in the block goes on, an interrupt too; the engine lives, and opens when told."""
    with thread_over(ScriptedBackend(short)) as engine:
        with pytest.raises(problem), engine.weight_update("8"):
            raise problem
        assert engine.stats().gate == "paused"
        assert engine.version is None
        handle = engine.submit(request("a"))
        assert not handle.at_rest
        engine.resume()
        assert handle.wait(timeout=10).final


def test_an_update_that_cannot_settle_says_so() -> None:
    """UpdateTimeout is raised by the `with` line, and the gate is open again."""
    backend = ScriptedBackend(endless)
    backend.deaf = True
    with thread_over(backend, close_timeout=0.2) as engine:
        handle = engine.submit(request("a"))
        eventually(held_tokens(handle))
        with pytest.raises(UpdateTimeout), engine.weight_update("8", timeout=0.05):
            pytest.fail("entered")
        assert engine.stats().gate == "open"


def test_collect_runs_slow_callers_beside_the_loop() -> None:
    """A plain source and filter run in other threads than the engine, which goes on meanwhile."""
    where: set[str] = set()

    def groups() -> Iterator[list[RolloutRequest]]:
        for number in range(20):
            where.add(threading.current_thread().name)
            yield [request(f"{number}-{i}", group_id=str(number), group_size=2, index=i) for i in range(2)]

    def whole(group: list[Snapshot]) -> bool:
        where.add(threading.current_thread().name)
        return group[0].request.group != "1"

    async def seen(group: tuple[Snapshot, ...]) -> None:
        where.add("async")

    with thread_over(ScriptedBackend(short), max_in_flight=4, name="engine") as engine:
        batch = engine.collect(groups(), target=3, filter=whole, on_group=seen)
        assert batch.reached
        assert [group[0].request.group for group in batch.filtered] == ["1"]
        assert len(batch.groups) == 3
        carried = engine.collect(target=len(batch.carried))
        assert {g[0].request.group for g in carried.groups} == {g[0].request.group for g in batch.carried}
        assert engine.ledger().balanced
    assert "engine" not in where
    assert "async" in where


def test_a_collect_that_times_out_carries_everything() -> None:
    """Nothing is delivered, and the next collect delivers the whole group."""
    hang = threading.Event()
    backend = ScriptedBackend(lambda call: short(call) if hang.is_set() else endless(call))
    with thread_over(backend) as engine:
        with pytest.raises(TimeoutError):
            engine.collect([[request("a")]], target=1, timeout=0.05)
        hang.set()
        eventually(lambda: engine.places() == {"a": "resumable"})
        eventually(lambda: engine.call(lambda: not engine.engine._collector.busy))
        batch = engine.collect(target=1, timeout=10)
        assert list(batch.groups[0][0].tokens) == [1, 2, 1, 2, 3]


def test_what_one_thread_stored_another_restores(tmp_path: Path) -> None:
    """Unfinished rollouts of a closed engine come back from its store and finish."""
    path = tmp_path / "run.db"
    with SqliteStore(path) as store, thread_over(ScriptedBackend(endless), store=store) as engine:
        handle = engine.submit(request("a"))
        eventually(held_tokens(handle))
    with SqliteStore(path) as store, thread_over(ScriptedBackend(short), store=store) as engine:
        handles, unreadable = engine.restore()
        assert not unreadable
        assert list(handles[0].wait(timeout=10).tokens) == [1, 2, 1, 2, 3]


def test_policies_travel_with_submit() -> None:
    """A policy given to `submit` is the rollout's."""
    with thread_over(ScriptedBackend(lambda _: [])) as engine:
        policy = Policy(max_attempts=1)
        assert engine.submit(request(), policy=policy).wait(timeout=10).state is RolloutState.FAILED
        assert engine.generate(request(), policy=policy).state is RolloutState.FAILED


# -- misuse and endings ----------------------------------------------------------------------------------------


def test_calls_outside_the_block_are_refused() -> None:
    """Before and after its block an engine thread takes no calls, and it cannot be entered twice."""
    thread = thread_over(ScriptedBackend(short))
    with pytest.raises(EngineClosed, match="inside its `with` block"):
        thread.submit(request())
    with thread:
        handle = thread.submit(request())
    for late in (thread.stats, lambda: thread.submit(request()), lambda: handle.wait(1)):
        with pytest.raises(EngineClosed, match="inside its `with` block"):
            late()
    with pytest.raises(EngineClosed, match="entered once"), thread:
        pytest.fail("entered")


def test_a_call_from_the_engines_own_thread_is_refused() -> None:
    """It would wait for itself for ever; the message says so."""
    with thread_over(ScriptedBackend(short)) as engine, pytest.raises(ConfigurationError, match="for itself"):
        engine.call(engine.stats)


def test_unknown_loops_are_refused() -> None:
    """The message says which are known."""
    with pytest.raises(ConfigurationError, match="'asyncio' or 'trio', not 'twisted'"):
        thread_over(ScriptedBackend(short), loop="twisted")


def test_a_backend_that_cannot_start_raises_at_the_with_line() -> None:
    """The factory's exception is raised as it is, and no thread is left."""

    def broken() -> AbstractAsyncContextManager[Any]:
        raise OSError("no such server")

    before = threading.active_count()
    with pytest.raises(OSError, match="no such server"), EngineThread(broken):
        pytest.fail("entered")
    with (
        pytest.raises(ConfigurationError, match="settings are"),
        thread_over(ScriptedBackend(short), nonsense=1),
    ):
        pytest.fail("entered")
    assert threading.active_count() == before


def test_leaving_the_block_ends_the_calls_of_other_threads() -> None:
    """A thread that waits gets what its rollout came to; one that holds an update open is told of the end."""
    reasons: list[Any] = []
    errors: list[EngineClosed] = []
    update_is_open, go = threading.Event(), threading.Event()

    def hold(engine: EngineThread) -> None:
        try:
            with engine.weight_update("8"):
                update_is_open.set()
                go.wait(10)
        except EngineClosed as error:
            errors.append(error)

    with thread_over(ScriptedBackend(short)) as engine:
        holder = threading.Thread(target=hold, args=(engine,))
        holder.start()
        assert update_is_open.wait(10)
        handle = engine.submit(request("never dispatched"))
        future = engine.start(handle.inner.wait)
        waiter = threading.Thread(target=lambda: reasons.append(future.result().reason))
        waiter.start()
    go.set()
    holder.join(10)
    waiter.join(10)
    assert reasons == [Reason.SHUTDOWN]
    assert [str(error) for error in errors] == [
        "the engine thread is not open: use it inside its `with` block"
    ]


def test_a_call_that_the_end_cuts_short_is_no_cancellation() -> None:
    """Who awaits it in another loop is told that the engine is closed, not that somebody cancelled it."""
    with thread_over(ScriptedBackend(short)) as engine:
        future = engine.start(anyio.sleep_forever)
    with pytest.raises(EngineClosed):
        future.result(timeout=10)


def test_an_engine_whose_loop_breaks_is_reported_and_its_thread_ends() -> None:
    """What breaks beside the engine ends the thread; waiting calls and later ones say so, the block raises it."""
    broken = anyio.Event()

    async def bug() -> None:
        await broken.wait()
        raise ZeroDivisionError("a bug")

    @asynccontextmanager
    async def fragile() -> AsyncIterator[ScriptedBackend]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bug)
            yield ScriptedBackend(endless)

    with pytest.raises(ZeroDivisionError, match="a bug"):  # noqa: SIM117, PT012
        with EngineThread(fragile) as thread:
            handle = thread.submit(request())
            eventually(held_tokens(handle))
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(handle.wait, timeout=10)
                eventually(lambda: thread.call(lambda: handle.id in thread.engine.core.waiters._rest))
                thread.call(broken.set)
                assert waiting.result(10).reason is Reason.SHUTDOWN
            eventually(lambda: "lifecycle-engine" not in {one.name for one in threading.enumerate()})
            with pytest.raises(EngineClosed, match="has ended: ZeroDivisionError"):
                thread.stats()


class Interrupted:
    """A future, or an event, whose first wait is broken off as Ctrl-C does it."""

    def __init__(self, inner: Any, log: list[str]) -> None:
        self._inner = inner
        self._log = log

    def _wait(self, name: str, *args: Any) -> Any:
        if not self._log:
            self._log.append("interrupted")
            raise KeyboardInterrupt
        return getattr(self._inner, name)(*args)

    def result(self, timeout: float | None = None) -> Any:
        """Of a future."""
        return self._wait("result", timeout)

    def wait(self, timeout: float | None = None) -> Any:
        """Of an event."""
        return self._wait("wait", timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_an_interrupt_in_a_wait_ends_the_wait_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout goes on, and the engine can be used."""
    with thread_over(ScriptedBackend(endless)) as engine:
        handle = engine.submit(request("a"))
        eventually(held_tokens(handle))
        log: list[str] = []
        start = engine.start
        monkeypatch.setattr(engine, "start", lambda *args: Interrupted(start(*args), log))
        with pytest.raises(KeyboardInterrupt):
            handle.wait(timeout=10)
        assert engine.places() == {"a": "in_flight"}


def test_an_interrupt_on_the_way_out_is_raised_when_all_is_done() -> None:
    """The engine is closed all the same: aborted on the server, thread gone."""
    backend = ScriptedBackend(endless)
    thread = thread_over(backend).__enter__()
    handle = thread.submit(request("a"))
    eventually(held_tokens(handle))
    gone: Any = Interrupted(thread._gone, [])
    thread._gone = gone
    with pytest.raises(KeyboardInterrupt):
        thread.__exit__(None, None, None)
    assert handle.inner.rollout.outcome is Outcome.CONFIRMED
    assert backend.live == {}
    assert "lifecycle-engine" not in {one.name for one in threading.enumerate()}


def test_an_interrupt_while_an_update_ends_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers run again and the label is published before the interrupt is raised."""
    with thread_over(ScriptedBackend(short)) as engine:
        log: list[str] = []
        start = engine.start

        def interrupted_later(function: Any, *args: Any) -> Any:
            future = start(function, *args)
            return Interrupted(future, log) if function.__name__ == "stay" else future

        monkeypatch.setattr(engine, "start", interrupted_later)
        with pytest.raises(KeyboardInterrupt), engine.weight_update("8"):
            pass
        assert engine.version == "8"
        assert engine.stats().gate == "open"


def test_an_interrupt_while_an_update_begins_gives_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate is open again, and no update is left waiting."""
    backend = ScriptedBackend(endless)
    backend.deaf = True
    with thread_over(backend, close_timeout=0.2) as engine:
        handle = engine.submit(request("a"))
        eventually(held_tokens(handle))
        log: list[str] = []
        monkeypatch.setattr(loop, "Future", lambda: Interrupted(Future(), log))
        with pytest.raises(KeyboardInterrupt), engine.weight_update("8"):
            pytest.fail("entered")
        eventually(lambda: engine.stats().gate == "open")


def test_time_outs_of_the_called_are_not_taken_for_ours() -> None:
    """A TimeoutError that the function itself raises comes as it is."""

    async def late() -> None:
        raise TimeoutError("mine")

    with thread_over(ScriptedBackend(short)) as engine, pytest.raises(TimeoutError, match="mine"):
        engine.call(late, timeout=10)


def test_weights_changed_by_others_can_be_noted() -> None:
    """Prefixes that are too old for their policy begin again."""
    backend = ScriptedBackend(
        lambda call: (
            [tokens(1, version="1"), Hang()] if call.attempt == 1 else [tokens(2, version="2"), finish()]
        )
    )
    with thread_over(backend, version="1", policy=Policy(max_staleness=0)) as engine:
        handle = engine.submit(request("a"))
        eventually(lambda: len(handle.snapshot().tokens) == 1)
        handle.abort()
        engine.note_version("2")
        assert engine.version == "2"
        assert list(engine.submit(handle.snapshot()).wait(timeout=10).tokens) == [2]


def test_the_engine_inside_is_there_only_while_the_block_runs() -> None:
    """Before, asking for it says so."""
    with pytest.raises(EngineClosed, match="inside its `with` block"):
        _ = thread_over(ScriptedBackend(short)).engine


def test_a_long_wait_is_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often signals are looked for meanwhile: the result comes, and a time-out is as long as was asked for."""
    monkeypatch.setattr(loop, "SIGNAL_SECONDS", 0.001)
    future: Future[str] = Future()
    threading.Timer(0.05, future.set_result, ["done"]).start()
    assert loop.result_of(future) == "done"
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        loop.result_of(Future(), timeout=0.02)
    assert time.monotonic() - begun >= 0.02


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", body], capture_output=True, text=True, timeout=50, check=False
    )


PREAMBLE = """
import _thread, anyio, os, signal, sys, threading, time
from contextlib import nullcontext
from lifecycle import EngineThread, EngineClosed, RolloutRequest
from lifecycle.testing.backend import Hang, ScriptedBackend, tokens
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with it ignored
backend = ScriptedBackend(lambda call: [tokens(1), Hang()])
request = RolloutRequest(prompt_ids=[1])
"""


@pytest.mark.parametrize(
    "interrupt",
    ["os.kill(os.getpid(), signal.SIGINT)", "_thread.interrupt_main()"],
    ids=["signal", "overlooked signal"],
)
def test_a_keyboard_interrupt_leaves_nothing_behind(interrupt: str) -> None:
    """Ctrl-C while plain code waits, and again while the block is left: aborted on the server, no thread, no hang.

    The second way is a signal that came just before the interpreter waits: noted, but it wakes nobody.
    """
    result = run_script(
        PREAMBLE
        + f"def press_key(): {interrupt}\n"
        + """
pressed = threading.Event()
class Patient(ScriptedBackend):
    async def abort(self, calls, **options):
        while not pressed.is_set(): await anyio.sleep(0.001)
        return await super().abort(calls, **options)
backend = Patient(backend.script)
def press():
    while not backend.live: time.sleep(0.002)
    press_key()
    while not engine._closing: time.sleep(0.0005)
    press_key()
    pressed.set()
threading.Thread(target=press, daemon=True).start()
try:
    with EngineThread(lambda: nullcontext(backend)) as engine:
        engine.generate(request)
except KeyboardInterrupt:
    alive = [t.name for t in threading.enumerate() if t.name == "lifecycle-engine"]
    print(len(backend.aborted) >= 1, backend.live, alive)
"""
    )
    assert result.stdout == "True {} []\n", result.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_that_the_engine_is_not_there() -> None:
    """In the child every call raises, and leaving the block touches nothing; the parent's engine goes on."""
    result = run_script(
        PREAMBLE
        + """
with EngineThread(lambda: nullcontext(backend)) as engine:
    child = os.fork()
    if child == 0:
        try:
            engine.submit(request)
        except EngineClosed as error:
            print("fork" in str(error), flush=True)
    else:
        os.waitpid(child, 0)
        handle = engine.submit(request)
        handle.abort()
        print(handle.at_rest)
"""
    )
    assert result.stdout == "True\nTrue\n", result.stderr
