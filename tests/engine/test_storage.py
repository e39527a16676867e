"""An engine with a store: saved before the caller hears, restored by another, and fenced."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from lifecycle.engine import LifecycleEngine
from lifecycle.errors import Fenced, SnapshotCorrupt, StoreUnavailable
from lifecycle.log import read_log
from lifecycle.log.records import (
    RolloutDisposition,
    RolloutRest,
    RolloutRestored,
    SnapshotSaved,
    StreamAnomaly,
    event_name,
)
from lifecycle.policy import Policy
from lifecycle.snapshot import Snapshot
from lifecycle.states import Disposition, Reason, RolloutState
from lifecycle.stores import Claim, MemoryStore, SqliteStore
from lifecycle.testing.backend import Hang, Pause, ScriptedBackend, finish, tokens
from tests.support.driving import Lines, engine_on, group, request, scripts, simple, until

pytestmark = pytest.mark.anyio

HANGING = lambda _: [tokens(1), Hang()]  # noqa: E731  a script


async def test_a_rest_is_saved_before_the_caller_hears() -> None:
    """State, tokens and the disposition of who waited."""
    store, lines = MemoryStore(), Lines()
    async with engine_on(ScriptedBackend(simple(1, 2)), lines, store=store) as engine:
        handle = engine.submit(request())
        assert store.load("a").state is RolloutState.PENDING
        snapshot = await handle.wait()
        stored = store.load("a")
        assert stored.disposition is Disposition.DELIVERED
        assert stored.agrees_with(snapshot)
        assert stored.state is RolloutState.COMPLETED
        assert store.pending() == []
        assert engine.stats().store["saved"] > 0
    assert sum(line["snapshots"] for line in lines.of(SnapshotSaved)) >= 2


async def test_checkpoints_save_what_is_in_flight() -> None:
    """After so many tokens, or after so long."""
    store = MemoryStore()
    backend = ScriptedBackend(lambda _: [tokens(*range(5)), tokens(5), Pause(30), tokens(6), Hang()])
    async with engine_on(backend, store=store, checkpoint_tokens=5, checkpoint_seconds=10.0) as engine:
        handle = engine.submit(request())
        await until(lambda: len(handle.rollout.tokens) == 6)
        assert len(store.load("a").tokens) == 5
        await anyio.sleep(12)
        assert len(store.load("a").tokens) == 6
        assert store.load("a").state is RolloutState.PARTIAL
        await anyio.sleep(12)
        await until(lambda: len(handle.rollout.tokens) == 7)


async def test_another_process_goes_on_with_what_was_released() -> None:
    """Aborted at the close, restored with its tokens, finished, delivered once."""
    store, lines = MemoryStore(), Lines()
    async with engine_on(ScriptedBackend(HANGING), store=store) as first:
        handle = first.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
    async with engine_on(ScriptedBackend(simple(2)), lines, store=store) as second:
        report = await second.restore()
        assert report.unreadable == ()
        assert [handle.id for handle in report.handles] == ["a"]
        done = await report.handles[0].wait()
        assert list(done.tokens) == [1, 2]
        assert second.ledger().balanced
        assert (await second.restore()).handles == ()
    restored = lines.of(RolloutRestored)[0]
    assert (restored["state"], restored["tokens"], restored["from_process"]) == (
        "aborted",
        1,
        first.process_id,
    )
    assert restored["seq"] == 1
    assert restored["epoch"] > 0
    assert store.pending() == []


async def test_a_crash_brings_back_the_last_checkpoint() -> None:
    """What was in flight is aborted, reason crash; force takes it from an owner that is gone."""
    store = MemoryStore()
    crashed = engine_on(ScriptedBackend(HANGING), store=store, checkpoint_tokens=1)
    async with crashed:
        handle = crashed.submit(request("a"))
        waiting = crashed.submit(request("b", text="words"))
        await until(lambda: handle.state is RolloutState.PARTIAL and waiting.state is RolloutState.PARTIAL)
        async with engine_on(ScriptedBackend(simple(2)), store=store) as heir:
            assert (await heir.restore()).handles == ()
            handles = (await heir.restore(force=True, resume=False)).handles
            assert {(h.id, h.state, h.snapshot().reason) for h in handles} == {
                ("a", RolloutState.ABORTED, Reason.CRASH),
                ("b", RolloutState.ABORTED, Reason.CRASH),
            }
            assert store.load("a").reason is Reason.CRASH
            done = await heir.submit(handles[0].snapshot()).wait()
            assert list(done.tokens) == [1, 2]


async def test_completed_but_undelivered_rollouts_come_back_to_be_delivered() -> None:
    """Nothing is generated again."""
    store, backend = MemoryStore(), ScriptedBackend(simple(1))
    async with engine_on(backend, store=store) as first:
        handle = first.submit(request())
        await until(lambda: handle.at_rest)
    silent = ScriptedBackend(simple(9))
    async with engine_on(silent, store=store) as second:
        (restored,) = (await second.restore()).handles
        assert restored.at_rest
        assert list((await restored.wait()).tokens) == [1]
    assert silent.calls == []
    assert store.pending() == []


async def test_restored_groups_are_carried_into_the_next_collect() -> None:
    """Complete ones at once; a group of which a member was lost is completed by its source."""
    store = MemoryStore()
    async with engine_on(ScriptedBackend(HANGING), store=store) as first:
        for one in (*group("g"), group("h")[0]):
            first.submit(one)
        await until(lambda: len(first.core.flights) == 3)
    lines = Lines()
    async with engine_on(ScriptedBackend(simple(2)), lines, store=store) as second:
        await second.restore(resume=False)
        batch = await second.collect()
        assert [members[0].request.group for members in batch.groups] == ["g"]
        rest = await second.collect([group("h")])
        assert [member.id for member in rest.groups[0]] == ["h/0", "h/1"]
        assert second.ledger().balanced
    assert {line["disposition"] for line in lines.of(RolloutDisposition)} == {"delivered"}


async def test_what_cannot_be_read_is_reported() -> None:
    """The others come back all the same."""

    class Damaged(MemoryStore):
        def claim(self, owner, ttl, *, ids=None, force=False):
            claim = super().claim(owner, ttl, ids=ids, force=force)
            return Claim(claim.claimed, (SnapshotCorrupt("x", "checksum"),))

    async with engine_on(ScriptedBackend(simple(1)), store=Damaged()) as engine:
        report = await engine.restore()
        assert [str(error) for error in report.unreadable] == ["snapshot of rollout 'x' is corrupt: checksum"]


async def test_without_a_store_there_is_nothing_to_restore() -> None:
    """And nothing to wait for."""
    async with engine_on(ScriptedBackend(simple(1))) as engine:
        assert (await engine.restore()).handles == ()
        assert engine.stats().store == {}


async def test_a_rollout_that_is_alive_here_only_gets_its_new_epoch() -> None:
    """A forced restore claims our own, and goes on with them."""
    store, lines = MemoryStore(), Lines()
    async with engine_on(ScriptedBackend(HANGING), lines, store=store) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        before = handle.rollout.epoch
        assert (await engine.restore(force=True)).handles == ()
        assert handle.rollout.epoch > before
        assert handle.state is RolloutState.PARTIAL
        await handle.abort()
        assert (await handle.wait()).state is RolloutState.ABORTED
    assert lines.of(RolloutRestored) == []


async def test_a_fenced_rollout_delivers_nothing() -> None:
    """Another owner took it: whoever waits hears Fenced, and the request on the server is ended."""
    store, backend, lines = (
        MemoryStore(),
        ScriptedBackend(scripts(a=[[tokens(1), Pause(5), tokens(2), finish()]])),
        Lines(),
    )
    async with engine_on(backend, lines, store=store) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        store.claim("somebody else", 60.0, force=True)
        with pytest.raises(Fenced, match="'a'"):
            await handle.wait()
        assert engine.places() == {}
        ledger = engine.ledger()
        assert (ledger.released, ledger.balanced) == (1, True)
        assert engine.stats().store["fenced"] == 1
    (gave_up,) = lines.of(RolloutDisposition)
    assert (gave_up["disposition"], gave_up["reason"]) == ("none", "fenced")
    assert store.load("a").disposition is Disposition.NONE
    assert store.rows()[0].owner == "somebody else"


async def test_what_another_owner_went_on_with_comes_back_in_its_place() -> None:
    """Ours stood still, another took it over, added tokens and left: a restore ends our copy and brings the other's."""
    store, lines = MemoryStore(), Lines()
    first = ScriptedBackend(lambda call: [tokens(1), Hang()] if call.attempt == 1 else [tokens(4), finish()])
    async with engine_on(first, lines, store=store, checkpoint_tokens=1) as engine:
        flying, resting = engine.submit(request("a")), engine.submit(request("b"))
        await until(lambda: flying.state is resting.state is RolloutState.PARTIAL)
        await resting.abort()
        async with engine_on(ScriptedBackend(lambda _: [tokens(2, 3), Hang()]), store=store) as other:
            handles = (await other.restore(force=True)).handles
            await until(lambda: all(len(handle.rollout.tokens) == 3 for handle in handles))
        assert (flying.state, resting.state) == (RolloutState.PARTIAL, RolloutState.ABORTED)
        again = (await engine.restore()).handles
        for handle in (flying, resting):
            with pytest.raises(Fenced):
                await handle.wait()
        for handle in again:
            assert list((await handle.wait()).tokens) == [1, 2, 3, 4]
            assert store.load(handle.id).state is RolloutState.COMPLETED
        assert engine.places() == {}
        assert engine.ledger().balanced
        assert engine.ledger().released == 2
    assert store.pending() == []
    assert lines.of(StreamAnomaly, kind="snapshot_refused") == []
    for name in "ab":
        delivered = [line["disposition"] for line in lines.of(RolloutDisposition, rollout_id=name)]
        assert delivered == ["none", "delivered"]


async def test_a_pending_rollout_that_another_owner_has_taken_is_his() -> None:
    """He saves it in his name at once, so that tails of his are not taken for ours."""
    store = MemoryStore()
    async with engine_on(ScriptedBackend(HANGING), store=store, max_in_flight=1) as engine:
        engine.submit(request("a"))
        pending = engine.submit(request("b"))
        async with engine_on(ScriptedBackend(HANGING), store=store, checkpoint_tokens=1) as other:
            await other.restore(force=True)
            await until(lambda: len(store.load("b").tokens) == 1)
            assert store.load("b").process == other.process_id
        assert {handle.id for handle in (await engine.restore()).handles} == {"a", "b"}
        with pytest.raises(Fenced):
            await pending.wait()


async def test_a_fence_found_at_a_checkpoint_ends_the_stream() -> None:
    """Tokens for somebody else's rollout need not be generated here."""
    store, backend, lines = (
        MemoryStore(),
        ScriptedBackend(lambda _: [tokens(1), Pause(2), tokens(2), Hang()]),
        Lines(),
    )
    async with engine_on(backend, lines, store=store, checkpoint_tokens=1) as engine:
        handle = engine.submit(request("a"))
        await until(lambda: handle.state is RolloutState.PARTIAL)
        store.claim("somebody else", 60.0, force=True)
        await until(lambda: handle.at_rest)
        assert len(backend.aborted) >= 1
        assert handle.snapshot().reason is Reason.FENCED
        with pytest.raises(Fenced):
            await handle.wait()
        assert "a" not in engine.places()
        assert engine.ledger().balanced
    assert lines.of(RolloutRest, rollout_id="a")


async def test_a_fenced_group_is_not_in_the_batch() -> None:
    """It belongs to somebody else now."""
    store = MemoryStore()
    async with engine_on(ScriptedBackend(lambda _: [tokens(1), Pause(2), finish()]), store=store) as engine:
        async with anyio.create_task_group() as tasks:

            async def steal() -> None:
                await until(lambda: len(engine.core.flights) == 4)
                store.claim("somebody else", 60.0, ids=["g/0"], force=True)

            tasks.start_soon(steal)
            batch = await engine.collect([group("g"), group("h")])
        assert [members[0].request.group for members in batch.groups] == ["h"]
        assert engine.ledger().balanced


async def test_a_fence_while_resting_and_while_pending() -> None:
    """Both leave the engine."""
    store = MemoryStore()
    async with engine_on(ScriptedBackend(HANGING), store=store, max_in_flight=1) as engine:
        resting, pending = engine.submit(request("a")), engine.submit(request("b"))
        await until(lambda: resting.state is RolloutState.PARTIAL)
        assert pending.state is RolloutState.PENDING
        store.claim("somebody else", 60.0, force=True)
        engine.core.fence(pending.rollout)
        assert pending.state is RolloutState.ABORTED
        await resting.abort()
        engine.core.fence(resting.rollout)
        assert engine.places() == {}
        assert engine.ledger().released == 2
        assert engine.ledger().balanced
        with pytest.raises(Fenced):
            await resting.wait()


async def test_a_fence_of_what_has_left_already_is_nothing() -> None:
    """Given up here, taken over there: the write is refused, and nobody minds."""
    store = MemoryStore()
    async with engine_on(ScriptedBackend(HANGING), store=store, max_in_flight=1) as engine:
        flying, pending = engine.submit(request("a")), engine.submit(request("b"))
        await until(lambda: flying.state is RolloutState.PARTIAL)
        store.claim("somebody else", 60.0, ids=["b"], force=True)
        engine.discard(pending)
        await anyio.sleep(3)
        assert engine.places() == {"a": "in_flight"}
        assert engine.stats().store["fenced"] == 1


async def test_a_write_that_the_store_refuses_for_good_is_a_line() -> None:
    """The rollout goes on; whoever reads the log sees it."""
    store, lines = MemoryStore(), Lines()
    async with engine_on(ScriptedBackend(simple(1)), lines, store=store) as engine:
        handle = engine.submit(request())
        store.discard("a")
        engine.core.recorder.mark(handle.rollout, Disposition.NONE)
        assert (await handle.wait()).state is RolloutState.COMPLETED
    (line,) = lines.of(StreamAnomaly)
    assert line["rollout_id"] == "a"
    assert "not stored" in line["detail"]


async def test_a_store_in_memory_that_fails_is_told() -> None:
    """Nothing is tried again without a thread; the line says which write was lost, and a claim raises."""

    class Failing(MemoryStore):
        fails = False

        def flush(self) -> None:
            if self.fails:
                raise StoreUnavailable("no room")
            super().flush()

        def claim(self, owner, ttl, *, ids=None, force=False):
            raise StoreUnavailable("no answer")

    store, lines = Failing(), Lines()
    async with engine_on(ScriptedBackend(simple(1)), lines, store=store) as engine:
        store.fails = True
        handle = engine.submit(request())
        await until(lambda: handle.at_rest)
        store.fails = False
        with pytest.raises(StoreUnavailable, match="no answer"):
            await engine.restore()
    assert lines.of(StreamAnomaly)
    assert "no room" in lines.of(StreamAnomaly)[0]["detail"]


async def test_a_living_copy_that_another_owner_wrote_over_ends_and_comes_back() -> None:
    """Two processes had it; the later one's writes count, and the older copy gives way to them."""
    store = MemoryStore()
    async with engine_on(
        ScriptedBackend(lambda _: [tokens(1), Hang()]), store=store, checkpoint_tokens=1
    ) as older:
        handle = older.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        async with engine_on(
            ScriptedBackend(lambda _: [tokens(2), Hang()]), store=store, checkpoint_tokens=1
        ) as newer:
            (taken,) = (await newer.restore(force=True)).handles
            await until(lambda: list(taken.rollout.tokens) == [1, 2])
        (back,) = (await older.restore(force=True, resume=False)).handles
        assert list(back.snapshot().tokens) == [1, 2]
        assert handle.at_rest
        with pytest.raises(Fenced):
            await handle.wait()
        assert older.places() == {"a": "resumable"}
        assert older.ledger().balanced


async def test_a_restart_is_a_rollback_in_the_store() -> None:
    """Fewer tokens than are stored are accepted where they were dropped on purpose."""
    store, lines = MemoryStore(), Lines()
    policy = Policy(max_staleness=0)
    async with engine_on(
        ScriptedBackend(simple(5)), lines, store=store, policy=policy, version="1"
    ) as engine:
        engine.core.recorder.versions.publish("2")
        prefix = Snapshot.from_prefix(request(), [7, 8, 9], None, "1")
        assert list((await engine.generate(prefix)).tokens) == [5]
        assert list(store.load("a").tokens) == [5]
        assert lines.of(StreamAnomaly) == []


def test_a_store_with_a_thread_of_its_own(tmp_path: Path) -> None:
    """SQLite, in real time: saved, the lines in the file before the snapshot, restored by another engine."""

    async def first(store: SqliteStore) -> None:
        async with LifecycleEngine(ScriptedBackend(HANGING), store=store, log=tmp_path / "log") as engine:
            handle = engine.submit(request("a"))
            await engine.generate(request("b", max_new_tokens=0))
            while handle.state is not RolloutState.PARTIAL:
                await anyio.lowlevel.checkpoint()
            await handle.abort()
            await handle.wait()

    async def second(store: SqliteStore) -> list[int]:
        async with LifecycleEngine(ScriptedBackend(simple(2)), store=store) as engine:
            (handle,) = (await engine.restore()).handles
            return list((await handle.wait()).tokens)

    with SqliteStore(tmp_path / "s.db") as opened:
        anyio.run(first, opened)
    names = [event_name(line.record) for line in read_log(tmp_path / "log")]  # type: ignore[union-attr]
    assert names.index("rollout.rest") < names.index("snapshot.saved")
    assert json.loads((tmp_path / "log").read_text().splitlines()[-1])["event"] == "engine.stopped"
    with SqliteStore(tmp_path / "s.db") as opened:
        assert anyio.run(second, opened) == [1, 2]
