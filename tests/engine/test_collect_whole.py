"""Over random timings, faults, targets and cancellations: every group leaves through exactly one door, whole and once."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.sglang.simulator.brain import Brain
from adapters.sglang.simulator.faults import Fault, FaultKind
from adapters.sglang.simulator.settings import ServerSettings
from lifecycle.engine import Batch, LifecycleEngine
from lifecycle.policy import Policy
from lifecycle.request import RolloutRequest
from lifecycle.snapshot import Snapshot
from lifecycle.states import Disposition, RolloutState
from lifecycle.stores import MemoryStore
from lifecycle.testing.clock import run_virtual
from tests.support.brain_backend import BrainBackend
from tests.support.driving import Lines
from tests.support.examples import examples

DOORS = ("groups", "failed", "filtered", "stale")


@dataclass
class Plan:
    """What is collected, by which calls, on what kind of server."""

    sizes: list[int]
    budgets: list[int]
    calls: list[dict[str, Any]]
    faults: list[Fault]
    running: int
    in_flight: int
    gap: float
    seed: int


PLANS = st.builds(
    Plan,
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    budgets=st.lists(st.integers(1, 12), min_size=3, max_size=3),
    calls=st.lists(
        st.fixed_dictionaries(
            {
                "target": st.sampled_from([None, 0, 1, 1, 2, 3]),
                "max_groups": st.sampled_from([None, 1, 2]),
                "cancel_after": st.sampled_from([None, None, 0.0, 0.3, 1.0]),
                "filter": st.sampled_from(["none", "quick", "slow"]),
                "one_by_one": st.booleans(),
                "update": st.booleans(),
            }
        ),
        min_size=1,
        max_size=4,
    ),
    faults=st.lists(
        st.builds(
            Fault,
            st.sampled_from(
                [
                    FaultKind.CUT,
                    FaultKind.ABORT,
                    FaultKind.ERROR_CHUNK,
                    FaultKind.REFUSE,
                    FaultKind.STALL,
                    FaultKind.MALFORMED,
                ]
            ),
            nth=st.integers(0, 8),
            after=st.integers(0, 5),
            steps=st.integers(1, 20),
            status=st.sampled_from([None, 400, 503]),
        ),
        max_size=4,
    ),
    running=st.integers(1, 6),
    in_flight=st.integers(1, 8),
    gap=st.sampled_from([0.0, 0.2, 2.0]),
    seed=st.integers(0, 99),
)


async def source(plan: Plan) -> AsyncIterator[list[RolloutRequest]]:
    """The groups, with a pause before each."""
    for number, size in enumerate(plan.sizes):
        await anyio.sleep(plan.gap)
        yield [
            RolloutRequest(
                id=f"g{number}/{index}",
                prompt_ids=[number, index],
                group_id=f"g{number}",
                group_size=size,
                index=index,
                max_new_tokens=plan.budgets[index],
            )
            for index in range(size)
        ]


def judge(kind: str) -> Any:
    """A filter that refuses every third group, at once or after thinking about it."""

    def quick(members: list[Snapshot]) -> bool:
        assert all(member.state is RolloutState.COMPLETED for member in members)
        return int(members[0].request.group[1:]) % 3 != 2

    async def slow(members: list[Snapshot]) -> bool:
        await anyio.sleep(0.4)
        return quick(members)

    return {"none": None, "quick": quick, "slow": slow}[kind]


class Book:
    """Which group has left through which door."""

    def __init__(self) -> None:
        self.left: dict[str, str] = {}
        self.handed: list[str] = []

    def hand(self, members: tuple[Snapshot, ...]) -> None:
        """A group was delivered before the call returned."""
        self.handed.append(members[0].request.group)
        self.write("groups", members)

    def write(self, door: str, members: tuple[Snapshot, ...]) -> None:
        """A group has left."""
        name = members[0].request.group
        assert name not in self.left, f"{name} leaves through {door} and has left through {self.left[name]}"
        self.left[name] = door
        assert len(members) == members[0].request.group_size, "never in part"
        assert [member.request.index for member in members] == list(range(len(members)))
        whole = all(member.state is RolloutState.COMPLETED for member in members)
        assert whole is (door != "failed")
        assert {m.disposition for m in members} <= {
            Disposition.DELIVERED,
            Disposition(door) if door in {"filtered", "stale"} else Disposition.DELIVERED,
        }

    def close(self, batch: Batch, handed_before: int) -> None:
        """Everything that left with a batch."""
        told = set(self.handed[handed_before:])
        for door in DOORS:
            for members in getattr(batch, door):
                if door != "groups" or members[0].request.group not in told:
                    self.write(door, members)
        for members in batch.carried:
            assert members[0].request.group not in self.left


async def live(plan: Plan, lines: Lines, store: MemoryStore) -> None:
    """All calls, then one that takes what is left."""
    brain = Brain(ServerSettings(seed=5, max_running_requests=plan.running), plan.faults)
    backend, book = BrainBackend([brain]), Book()
    policy = Policy(
        backoff_initial=0.1, backoff_max=0.5, first_token_timeout=6.0, idle_timeout=6.0, max_attempts=50
    )
    async with anyio.create_task_group() as servers:
        servers.start_soon(backend.step_for_ever)
        engine = LifecycleEngine(
            backend,
            log=lines,
            store=store,
            policy=policy,
            random=Random(plan.seed),
            max_in_flight=plan.in_flight,
            abort_timeout=3.0,  # type: ignore[arg-type]
        )
        async with engine:
            feed = source(plan)
            for number, about in enumerate(plan.calls):
                await call(engine, feed, about, book, str(number))
                assert engine.ledger().balanced
            handed = len(book.handed)
            rest = await engine.collect(feed)
            book.close(rest, handed)
            assert rest.reached
            assert rest.carried == ()
            assert engine.places() == {}
            assert engine.ledger().balanced
        assert set(book.left) == {f"g{number}" for number in range(len(plan.sizes))}, "every group has left"
        servers.cancel_scope.cancel()


async def call(engine: LifecycleEngine, feed: Any, about: dict[str, Any], book: Book, version: str) -> None:
    """One collect, perhaps cancelled, perhaps over a weight update."""
    handed = len(book.handed)
    batch: Batch | None = None
    async with anyio.create_task_group() as tasks:
        if about["update"]:
            tasks.start_soon(update, engine, version)
        with anyio.move_on_after(about["cancel_after"]):
            batch = await engine.collect(
                feed,
                target=about["target"],
                max_groups=about["max_groups"],
                filter=judge(about["filter"]),
                on_group=book.hand if about["one_by_one"] else None,
            )
    if batch is not None:
        book.close(batch, handed)
        assert about["target"] is None or len(batch.groups) <= about["target"]
        assert batch.reached or len(batch.groups) < (about["target"] or 1)


async def update(engine: LifecycleEngine, version: str) -> None:
    """Weights change in the middle."""
    await anyio.sleep(0.3)
    async with engine.weight_update(version):
        await anyio.sleep(0.2)


@settings(max_examples=examples(80))
@given(PLANS)
def test_every_group_leaves_once_and_whole(plan: Plan) -> None:
    """Delivered, failed, filtered or stale; carried only in between; the log and the store say the same."""
    lines, store = Lines(), MemoryStore()
    run_virtual(live, plan, lines, store)
    assert store.pending() == []
    ended = Counter(
        about["group_id"]
        for event, about in lines.all
        if event in {"group.delivered", "group.failed", "group.filtered", "group.stale"}
    )
    assert ended == {f"g{number}": 1 for number in range(len(plan.sizes))}
    disposed = Counter(
        about["rollout_id"]
        for event, about in lines.all
        if event == "rollout.disposition" and about["disposition"] != "carried"
    )
    assert set(disposed.values()) <= {1}
