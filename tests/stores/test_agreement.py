"""Two stores, one meaning: whatever is done to both, they answer the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle.errors import SnapshotError
from lifecycle.snapshot import Tail
from lifecycle.states import Disposition, RolloutState
from lifecycle.stores import MemoryStore, SnapshotStore, SqliteStore
from lifecycle.testing.stores import TTL, ManualClock, same, snapshot, tail
from tests.support.stores import fast_folder

names = st.sampled_from(["r1", "r2"])
owners = st.sampled_from(["a", "b"])
epochs = st.integers(0, 6)
sizes = st.integers(0, 6)
operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            names,
            sizes,
            st.sampled_from(RolloutState),
            st.integers(0, 2),
            st.sampled_from([0, 0, 0, 50]),
            epochs,
            owners,
            st.booleans(),
            st.booleans(),
        ),
        st.tuples(
            st.just("append"), names, sizes, sizes, st.integers(0, 2), st.sampled_from([0, 0, 50]), epochs
        ),
        st.tuples(st.just("mark"), names, st.sampled_from(Disposition), epochs),
        st.tuples(st.just("claim"), owners, st.booleans()),
        st.tuples(st.just("wait"), st.sampled_from([1.0, TTL + 1])),
        st.tuples(st.sampled_from(["renew", "release"]), owners),
        st.tuples(st.just("discard"), names),
        st.just(("new_epoch",)),
    ),
    max_size=25,
)


def other_tail(rollout_id: str, start: int, count: int, attempt: int, first: int) -> Tail:
    """A tail, of other tokens where `first` is not 0."""
    made = tail(rollout_id, start, count, attempt=attempt)
    for place in range(count):
        made.tokens[place] += first
    return made


def with_epoch(step: tuple[Any, ...], handed_out: list[int]) -> tuple[Any, ...]:
    """The step with an epoch that the stores gave, for the number that stands for one."""
    place = {"put": 6, "append": 6, "mark": 3}.get(step[0])
    if place is None:
        return step
    return (*step[:place], handed_out[step[place] % len(handed_out)], *step[place + 1 :])


def do(store: SnapshotStore, operation: str, *words: Any) -> Any:
    """One operation; what it answered, or which error it raised."""
    try:
        match operation, words:
            case "put", (name, size, state, attempt, first, epoch, owner, rollback, anew):
                value = snapshot(name, size, first=first, state=state, attempt=attempt)
                return store.put(value, epoch, owner=owner, ttl=TTL, rollback=rollback, anew=anew)
            case "append", (name, start, count, attempt, first, epoch):
                return store.append(other_tail(name, start, count, attempt, first), epoch)
            case "claim", (owner, force):
                claim = store.claim(owner, TTL, force=force)
                assert not claim.unreadable
                return [(claimed.snapshot.id, claimed.epoch) for claimed in claim.claimed]
            case "renew", (owner,):
                return store.renew(owner, TTL)
            case _:
                return getattr(store, operation)(*words)
    except (SnapshotError, KeyError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A fast disk."""
    with fast_folder() as name:
        yield Path(name)


@given(steps=operations)
@settings(max_examples=150, deadline=None)
def test_stores_agree(folder: Path, steps: list[tuple[Any, ...]]) -> None:
    """After every step both have answered alike, hold the same rows, and every row loads."""
    clock = ManualClock()
    for left in folder.iterdir():
        left.unlink()
    memory = MemoryStore(clock=clock)
    with SqliteStore(folder / "snapshots.db", clock=clock) as disk:
        handed_out = [memory.new_epoch()]
        assert disk.new_epoch() == handed_out[0]
        for step in steps:
            if step[0] == "wait":
                clock.advance(step[1])
                continue
            words = with_epoch(step, handed_out)
            answer = do(memory, *words)
            assert answer == do(disk, *words)
            if step[0] == "new_epoch":
                handed_out.append(answer)
            elif step[0] == "claim":
                handed_out.extend({epoch for _, epoch in answer})
            disk.flush()
            assert memory.rows() == disk.rows()
            assert memory.pending() == disk.pending()
            for row in disk.rows():
                assert same(memory.load(row.id), disk.load(row.id))
