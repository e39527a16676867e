"""What is saved when: at submit, at every rest before anybody hears, in flight, at pause, at close, at delivery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lifecycle.events import EndKind, StreamEnd
from lifecycle.policy import Policy
from lifecycle.rollout import Rollout
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition, Reason, RolloutState
from lifecycle.stores import MemoryStore
from lifecycle.testing.backend import Hang, Pause, ScriptedBackend, Step, finish, lost, tokens
from tests.support.driving import engine_on, group, request, simple, until

pytestmark = pytest.mark.anyio

STEADY: Sequence[Step] = [step for number in range(50) for step in (tokens(number), Pause(1.0))]


class Recording(MemoryStore):
    """Writes down every write: what, of which rollout, in which state, how many tokens it carried."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[str, str, str, int]] = []

    def put(self, snapshot: Snapshot, *rest: Any, **how: Any) -> None:
        """A whole snapshot."""
        self.writes.append(("put", snapshot.id, str(snapshot.state), len(snapshot.tokens)))
        super().put(snapshot, *rest, **how)

    def append(self, tail: Tail, epoch: int) -> None:
        """A tail."""
        self.writes.append(("append", tail.id, str(tail.state), len(tail.tokens)))
        super().append(tail, epoch)

    def mark(self, rollout_id: str, disposition: Disposition, epoch: int) -> None:
        """A disposition."""
        self.writes.append(("mark", rollout_id, str(disposition), 0))
        super().mark(rollout_id, disposition, epoch)


async def test_at_submit() -> None:
    """A request as pending, a snapshot with all its tokens, before submit returns."""
    store = Recording()
    async with engine_on(ScriptedBackend(simple(1)), store=store) as engine:
        engine.submit(request("fresh"))
        engine.submit(Snapshot.from_prefix(request("begun"), [1, 2, 3]))
        assert store.writes[:2] == [("put", "fresh", "pending", 0), ("put", "begun", "aborted", 3)]
        assert list(store.load("begun").tokens) == [1, 2, 3]


async def test_the_ids_of_a_text_prompt() -> None:
    """Another process goes on from the ids that were sent, whatever its own tokenizer would say."""
    store = Recording()
    async with engine_on(ScriptedBackend(lambda _: [tokens(7), Hang()]), store=store) as engine:
        handle = engine.submit(request(text="words"))
        await until(lambda: handle.state is RolloutState.PARTIAL)
        assert store.load("a").prompt_ids == tuple(b"words")


@pytest.mark.parametrize(
    ("script", "state"),
    [
        ([tokens(1, 2), finish()], RolloutState.COMPLETED),
        ([tokens(1), StreamEnd(EndKind.REJECTED, Reason.MALFORMED)], RolloutState.FAILED),
        ([lost(Reason.TRUNCATED)], RolloutState.FAILED),
        ([tokens(1), Hang()], RolloutState.ABORTED),
    ],
    ids=["completed", "rejected", "exhausted", "aborted"],
)
async def test_at_rest_before_anybody_hears(script: Sequence[Step], state: RolloutState) -> None:
    """Whoever is told of a rest finds it in the store, with the same state and tokens."""
    store, heard = Recording(), []
    policy = Policy(max_attempts=2, backoff_initial=0.1)

    def hear(rollout: Rollout) -> None:
        stored = store.load(rollout.id)
        heard.append((stored.state, stored.tokens == rollout.tokens, stored.reason == rollout.reason))

    async with engine_on(ScriptedBackend(lambda _: script), store=store, policy=policy) as engine:
        engine.core.on_rest.append(hear)
        handle = engine.submit(request())
        if state is RolloutState.ABORTED:
            await until(lambda: handle.state is RolloutState.PARTIAL)
            await handle.abort()
        await handle.wait()
        assert heard == [(state, True, True)]
        if state is RolloutState.ABORTED:
            engine.discard(handle)
            assert heard[1:] == [(RolloutState.DISCARDED, True, True)]


@pytest.mark.parametrize(
    ("limit", "pieces"),
    [({"checkpoint_tokens": 5, "checkpoint_seconds": 1e6}, 5), ({"checkpoint_tokens": 10**6}, 10)],
    ids=["by tokens", "by seconds"],
)
async def test_in_flight_by_tails_only(limit: dict[str, Any], pieces: int) -> None:
    """Each checkpoint carries what is new and nothing else."""
    store = Recording()
    async with engine_on(ScriptedBackend(lambda _: STEADY), store=store, **limit) as engine:
        handle = engine.submit(request())
        await until(lambda: len(handle.rollout.tokens) == 45)
        (first, *others) = store.writes
        assert first == ("put", "a", "pending", 0)
        assert {(what, state) for what, _, state, _ in others} == {("append", "partial")}
        sizes = [size for *_, size in others]
        assert sum(sizes) == len(store.load("a").tokens) > 45 - pieces - 2
        assert max(sizes) <= pieces + 1
        assert min(sizes) >= pieces - 1


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_at_the_pause_of_a_weight_update(mode: str) -> None:
    """Whatever dies while the weights are changed, every token seen before is in the store."""
    store = Recording()
    backend = ScriptedBackend(lambda _: [tokens(1), tokens(2), tokens(3), Hang()])
    async with engine_on(backend, store=store) as engine:
        handles = [engine.submit(request(name)) for name in "ab"]
        await until(lambda: all(len(handle.rollout.tokens) == 3 for handle in handles))
        assert all(len(store.load(name).tokens) == 0 for name in "ab")
        async with engine.weight_update("8", mode):
            assert all(list(store.load(name).tokens) == [1, 2, 3] for name in "ab")


async def test_at_close() -> None:
    """Pending, in flight and at rest: all of it, as aborted where it was not final, and free for others."""
    store = Recording()
    async with engine_on(
        ScriptedBackend(lambda call: [tokens(1, 2), finish() if call.rollout_id == "done" else Hang()]),
        store=store,
        max_in_flight=1,
    ) as engine:
        done = engine.submit(request("done"))
        await until(lambda: done.at_rest)
        flying, _ = engine.submit(request("flying")), engine.submit(request("pending"))
        await until(lambda: flying.state is RolloutState.PARTIAL)
    found = {row.id: (row.state, row.tokens) for row in store.rows()}
    assert found == {"done": ("completed", 2), "flying": ("aborted", 2), "pending": ("aborted", 0)}
    assert {row.id for row in store.pending()} == found.keys()
    assert {row.lease_until for row in store.rows()} == {None}


async def test_the_disposition_after_the_rest_and_before_the_caller_has_the_sample() -> None:
    """Of a rollout that was waited for, and of every member of a group."""
    store = Recording()
    async with engine_on(ScriptedBackend(simple(1)), store=store) as engine:
        await engine.generate(request("one"))
        assert store.writes[-2:] == [("put", "one", "completed", 1), ("mark", "one", "delivered", 0)]
        handed: list[set[Disposition]] = []

        def on_group(members: tuple[Snapshot, ...]) -> None:
            handed.append({store.load(member.id).disposition for member in members})

        await engine.collect([group("g")], on_group=on_group)
        assert handed == [{Disposition.DELIVERED}]
        await engine.collect([group("h")], filter=lambda _: False)
        assert {store.load(f"h/{index}").disposition for index in range(2)} == {Disposition.FILTERED}


async def test_a_carried_group() -> None:
    """It comes back by a restore in another engine, as carried, and is delivered there."""
    store = Recording()
    async with engine_on(ScriptedBackend(simple(1)), store=store) as engine:
        await engine.collect([group("g"), group("h")], target=1)
    carried = {row.id for row in store.rows() if row.disposition == Disposition.CARRIED}
    assert carried == {row.id for row in store.pending()} == {"h/0", "h/1"}
    async with engine_on(ScriptedBackend(simple(9)), store=store) as heir:
        await heir.restore()
        (members,) = (await heir.collect()).groups
        assert [(member.id, list(member.tokens)) for member in members] == [("h/0", [1]), ("h/1", [1])]
    assert not store.pending()
