"""A store that stands still or refuses: streams go on, what waits is bounded, and everybody can see it."""

from __future__ import annotations

import threading

import anyio
import anyio.to_thread
import pytest

from lifecycle.engine import LifecycleEngine
from lifecycle.errors import StoreUnavailable
from lifecycle.events import StreamEvent
from lifecycle.log.records import SnapshotFailed, SnapshotSaved, StreamAnomaly
from lifecycle.states import Disposition, RolloutState
from lifecycle.stores import MemoryStore
from lifecycle.stores.backlog import ENTRY_BYTES, TOKEN_BYTES
from lifecycle.testing.backend import Hang, Pause, ScriptedBackend, finish, tokens
from tests.support.driving import Lines, engine_on, group, request, simple, until
from tests.support.writers import PATIENCE, FaultyStore

pytestmark = pytest.mark.anyio


class Threaded(FaultyStore):
    """Written to by a thread, like a store on a disk."""

    inline = False

    def stall(self) -> None:
        """Stand still from the next flush on."""
        self.gate.clear()

    def wait_stalled(self) -> None:
        """The thread stands in the store. The loop waits too, so that no virtual time passes meanwhile."""
        assert self.stalled.wait(PATIENCE)


def streams(count: int, pause: float) -> list[StreamEvent | Pause]:
    """One token every `pause` seconds."""
    return [step for number in range(count) for step in (tokens(number), Pause(pause))]


def waiting(engine: LifecycleEngine) -> tuple[int, int]:
    """Entries and bytes of the backlog."""
    stats = engine.stats().store
    return stats["backlog_operations"], stats["backlog_bytes"]


async def test_a_store_that_stalls_for_five_seconds() -> None:
    """Streams go on, the backlog has at most two entries a rollout, new ones are refused, and then all is saved."""
    store, lines, live = Threaded(), Lines(), 8
    backend = ScriptedBackend(lambda _: [*streams(90, 0.1), finish()])
    async with engine_on(backend, lines, store=store, checkpoint_tokens=4, backlog_rollouts=24) as engine:
        store.stall()
        handles = [engine.submit(request(f"r{number}")) for number in range(live)]
        store.wait_stalled()
        for second in range(1, 8):
            await anyio.sleep(1)
            held = sum(len(handle.rollout.tokens) for handle in handles)
            entries, size = waiting(engine)
            assert held >= live * 9 * second
            assert entries <= 2 * live
            assert size <= 2 * live * (ENTRY_BYTES + 3 * 4) + held * TOKEN_BYTES
        assert engine.stats().store["silent_s"] >= 5
        (told,) = lines.of(SnapshotFailed)
        assert "saved nothing for" in told["error"]
        with pytest.raises(StoreUnavailable, match="24 rollouts"):  # noqa: PT012  some are taken before
            while len(handles) < live + 24:
                handles.append(engine.submit(request(f"more-{len(handles)}")))
        assert live < len(handles) <= 24
        assert waiting(engine)[0] == 24
        assert not lines.of(SnapshotSaved)
        store.gate.set()
        for handle in handles:
            snapshot = await handle.wait()
            assert store.load(handle.id).agrees_with(snapshot)
            assert store.load(handle.id).disposition is Disposition.DELIVERED
        engine.submit(request("again"))
        await engine.drain()
        await until(lambda: engine.stats().store["silent_s"] == 0)
        assert waiting(engine) == (0, 0)
    assert lines.of(SnapshotSaved)


async def test_waiting_for_a_stalled_store_takes_no_threads() -> None:
    """A hundred waiters and more, and the threads that anyio lends are all there for the caller's own use."""
    store = Threaded()
    async with engine_on(ScriptedBackend(simple(1)), store=store) as engine:
        store.stall()
        handles = [engine.submit(request(f"r{number}")) for number in range(100)]
        store.wait_stalled()
        await until(lambda: all(handle.at_rest for handle in handles))
        before = threading.active_count()
        async with anyio.create_task_group() as tasks:
            for handle in handles:
                tasks.start_soon(handle.wait)
            await anyio.wait_all_tasks_blocked()
            assert threading.active_count() <= before
            assert anyio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
            assert await anyio.to_thread.run_sync(lambda: 7) == 7
            store.gate.set()
        assert not store.pending()


async def test_who_stops_waiting_for_a_stalled_store_stops_alone() -> None:
    """Its rollout is not delivered; the next one who waits gets it."""
    store = Threaded()
    async with engine_on(ScriptedBackend(simple(1)), store=store) as engine:
        store.stall()
        handle = engine.submit(request())
        store.wait_stalled()
        await until(lambda: handle.at_rest)
        with anyio.move_on_after(3) as scope:
            await handle.wait()
        assert scope.cancelled_caught
        assert handle.rollout.disposition is Disposition.NONE
        store.gate.set()
        assert (await handle.wait()).state is RolloutState.COMPLETED
        assert store.load("a").disposition is Disposition.DELIVERED


async def test_an_abort_waits_for_a_stalled_store_no_longer_than_it_may() -> None:
    """It reports what came of the rollouts in any case."""
    store = Threaded()
    async with engine_on(ScriptedBackend(lambda _: [tokens(1), Hang()]), store=store) as engine:
        store.stall()
        handle = engine.submit(request())
        store.wait_stalled()
        await until(lambda: handle.state is RolloutState.PARTIAL)
        began = anyio.current_time()
        report = await engine.abort(timeout=2.0)
        assert report.kept == ("a",)
        assert 1.9 < anyio.current_time() - began < 4.0
        store.gate.set()
        assert (await handle.wait()).state is RolloutState.ABORTED
        assert list(store.load("a").tokens) == [1]


async def test_a_cancelled_collect_does_not_wait_for_ever_on_a_stalled_store() -> None:
    """What it held is carried all the same."""
    store = Threaded()
    backend = ScriptedBackend(lambda call: [tokens(1), finish() if call.attempt > 1 else Hang()])
    async with engine_on(backend, store=store, close_timeout=3.0) as engine:
        store.stall()
        began = anyio.current_time()
        with anyio.move_on_after(1) as scope:
            await engine.collect([group("g")])
        assert scope.cancelled_caught
        assert anyio.current_time() - began < 8
        store.gate.set()
        assert set(engine.places().values()) == {"resumable"}
        (members,) = (await engine.collect()).groups
        assert [(member.id, list(member.tokens)) for member in members] == [("g/0", [1, 1]), ("g/1", [1, 1])]


async def test_a_write_that_is_refused_for_good_is_a_line_in_the_log() -> None:
    """Whether its rollout is still here or gone."""
    store, lines = MemoryStore(), Lines()
    async with engine_on(ScriptedBackend(lambda _: [tokens(1), Hang()]), lines, store=store) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        store.discard("a")
        engine.core.recorder.checkpoint(handle.rollout, 0)
        await anyio.sleep(2)
        (told,) = lines.of(StreamAnomaly, kind="snapshot_refused")
        assert (told["rollout_id"], told["attempt"], told["rid"]) == ("a", 1, handle.rollout.rid)
        assert "is not stored" in told["detail"]
        engine.discard(engine.submit(request("no\0name")))
    gone = lines.of(StreamAnomaly, kind="snapshot_refused", rollout_id="no\0name")
    assert [line["attempt"] for line in gone] == [0, 0]


async def test_closing_on_a_stalled_store_is_bounded_and_says_what_was_lost() -> None:
    """Who waits hears it too."""
    store = Threaded()
    engine = engine_on(ScriptedBackend(simple(1)), store=store, close_timeout=0.05)
    try:
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                with pytest.raises(StoreUnavailable):
                    await handle.wait()

            with pytest.raises(StoreUnavailable, match="could not be saved within"):  # noqa: PT012
                async with engine:
                    store.stall()
                    handle = engine.submit(request())
                    store.wait_stalled()
                    tasks.start_soon(wait)
                    await until(lambda: handle.at_rest)
    finally:
        store.gate.set()
