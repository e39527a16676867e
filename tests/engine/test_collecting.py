"""collect: targets, over-sampling, filters, sources, and what is carried."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anyio
import anyio.lowlevel
import pytest

from lifecycle.errors import ConfigurationError, DuplicateRollout, EngineClosed, StoreUnavailable
from lifecycle.events import EndKind, StreamEnd
from lifecycle.log.records import (
    GroupCarried,
    GroupDelivered,
    GroupFailed,
    GroupFiltered,
    GroupSettled,
    RolloutDisposition,
    RolloutTransition,
)
from lifecycle.policy import OnAbort, Policy
from lifecycle.request import RolloutRequest
from lifecycle.snapshot import Snapshot
from lifecycle.states import Disposition, Reason, RolloutState
from lifecycle.stores import MemoryStore
from lifecycle.testing.backend import Hang, Pause, ScriptedBackend, finish, lost, tokens
from tests.support.driving import Lines, engine_on, group, request, simple, until

pytestmark = pytest.mark.anyio

REFUSED = StreamEnd(EndKind.REJECTED, Reason.REFUSED, "no")


def names(groups) -> list[str]:
    """The group ids, in order."""
    return [members[0].request.group for members in groups]


def by_speed(**seconds: float):
    """Members of a group take as long as their group's letter says; negative: for ever."""

    def script(call):
        pause = seconds[call.rollout_id.split("/")[0]]
        return [tokens(1), Pause(pause), tokens(2), finish()] if pause >= 0 else [tokens(1), Hang()]

    return script


def settled_once(engine) -> None:
    """The books are even."""
    assert engine.ledger().balanced


async def test_without_a_target_everything_is_finished() -> None:
    """All groups of the source come back whole, in the order in which they settled."""
    lines = Lines()
    async with engine_on(ScriptedBackend(by_speed(a=3, b=1)), lines) as engine:
        batch = await engine.collect([group("a"), group("b", 3)])
        assert names(batch.groups) == ["b", "a"]
        assert [len(members) for members in batch.groups] == [3, 2]
        assert [member.request.index for member in batch.groups[0]] == [0, 1, 2]
        assert batch.reached
        assert batch.report is None
        assert engine.places() == {}
        assert engine.ledger().rollouts["delivered"] == 5
        settled_once(engine)
    assert [line["group_id"] for line in lines.of(GroupDelivered)] == ["b", "a"]
    assert len(lines.of(GroupSettled)) == 2


async def test_the_target_stops_and_the_rest_is_carried() -> None:
    """Over-sampling: the unfinished are aborted with their prefix and go on in the next call."""
    lines = Lines()
    backend = ScriptedBackend(by_speed(a=1, b=2, c=50, d=60))
    async with engine_on(backend, lines) as engine:
        first = await engine.collect([group(name) for name in "abcd"], target=2)
        assert names(first.groups) == ["a", "b"]
        assert sorted(names(first.carried)) == ["c", "d"]
        assert first.reached
        assert first.report is not None
        assert first.report.counts == {"confirmed": 4}
        assert {m.disposition for members in first.carried for m in members} == {Disposition.CARRIED}
        assert {next(iter(m.tokens)) for members in first.carried for m in members} == {1}
        settled_once(engine)
        second = await engine.collect()
        assert sorted(names(second.groups)) == ["c", "d"]
        assert {m.carries for members in second.groups for m in members} == {1}
        settled_once(engine)
    assert len(lines.of(GroupCarried)) == 2
    assert len(lines.of(GroupDelivered)) == 4


async def test_groups_members_come_in_the_order_of_their_index() -> None:
    """However the source gives them."""
    async with engine_on(ScriptedBackend(simple(1))) as engine:
        batch = await engine.collect([list(reversed(group("a", 3)))])
        assert [member.request.index for member in batch.groups[0]] == [0, 1, 2]


async def test_surplus_whole_groups_are_delivered_first_next_time() -> None:
    """A complete group beyond the target is kept and not generated again."""
    backend = ScriptedBackend(by_speed(a=1, b=1, c=1, d=1))
    async with engine_on(backend) as engine:
        first = await engine.collect([group(name) for name in "abc"], target=1)
        assert len(first.groups) == 1
        assert len(first.carried) == 2
        calls = len(backend.calls)
        second = await engine.collect([group("d")], target=2)
        assert sorted(names(first.groups) + names(second.groups)) == ["a", "b", "c"]
        assert len(backend.calls) == calls, (
            "the target was reached by what was carried: nothing new was admitted"
        )
        third = await engine.collect([group("d")], target=1)
        assert names(third.groups) == ["d"]
        settled_once(engine)


async def test_what_the_target_does_not_need_is_not_begun() -> None:
    """Carried whole groups reach the target; the carried unfinished ones are not even restored."""
    lines = Lines()
    async with engine_on(ScriptedBackend(by_speed(a=1, b=1, c=-1)), lines) as engine:
        await engine.collect([group(name) for name in "abc"], target=1)
        before = len(lines.of(RolloutTransition))
        second = await engine.collect(target=1)
        assert len(second.groups) == 1
        assert len(lines.of(RolloutTransition)) == before


async def test_a_failed_member_fails_its_group_and_never_counts() -> None:
    """The group goes to `failed` with its finished siblings; the target needs another one."""

    def script(call):
        return [REFUSED] if call.rollout_id == "a/1" else [tokens(1), Pause(1), finish()]

    lines = Lines()
    async with engine_on(ScriptedBackend(script), lines) as engine:
        batch = await engine.collect([group("a"), group("b")], target=1)
        assert names(batch.groups) == ["b"]
        assert names(batch.failed) == ["a"]
        assert [m.state for m in batch.failed[0]] == [RolloutState.COMPLETED, RolloutState.FAILED]
        assert engine.places() == {}
        settled_once(engine)
    assert len(lines.of(GroupFailed)) == 1


async def test_a_target_that_cannot_be_reached_returns_short() -> None:
    """Reached is False when the source is used up."""
    async with engine_on(ScriptedBackend(simple(1))) as engine:
        batch = await engine.collect([group("a")], target=3)
        assert len(batch.groups) == 1
        assert not batch.reached
        nothing = await engine.collect(target=0)
        assert nothing.reached
        assert nothing.groups == ()
        with pytest.raises(ConfigurationError, match="target"):
            await engine.collect(target=-1)
        with pytest.raises(ConfigurationError, match="max_groups"):
            await engine.collect(max_groups=0)


@pytest.mark.parametrize("slow", [False, True])
async def test_a_filter_sees_whole_groups_and_its_verdict_is_a_disposition(slow: bool) -> None:
    """Refused groups are `filtered`, and their tokens wasted."""
    seen = []

    def judge(members: list[Snapshot]) -> bool:
        seen.append([member.state for member in members])
        return members[0].request.group != "a"

    async def judge_slowly(members: list[Snapshot]) -> bool:
        await anyio.sleep(5)
        return judge(members)

    lines = Lines()
    async with engine_on(ScriptedBackend(by_speed(a=1, b=2, c=3)), lines) as engine:
        batch = await engine.collect(
            [group(name) for name in "abc"], target=2, filter=judge_slowly if slow else judge
        )
        assert sorted(names(batch.groups)) == ["b", "c"]
        assert names(batch.filtered) == ["a"]
        assert {m.disposition for m in batch.filtered[0]} == {Disposition.FILTERED}
        assert engine.ledger().wasted == {"filtered": 4}
        settled_once(engine)
    assert seen == [[RolloutState.COMPLETED] * 2] * 3
    assert len(lines.of(GroupFiltered)) == 1


async def test_a_group_whose_filter_is_still_thinking_at_the_stop_is_carried() -> None:
    """It is whole, and is asked about again next time."""

    async def judge(members: list[Snapshot]) -> bool:
        await anyio.sleep(0.1 if members[0].request.group == "a" else 1000)
        return True

    async with engine_on(ScriptedBackend(simple(1))) as engine:
        first = await engine.collect([group("a"), group("b")], target=1, filter=judge)
        assert (names(first.groups), names(first.carried)) == (["a"], ["b"])
        second = await engine.collect()
        assert names(second.groups) == ["b"]
        settled_once(engine)


async def test_a_filter_that_raises_ends_the_call_and_loses_nothing() -> None:
    """The exception comes out as it is; every group is carried."""

    def judge(members: list[Snapshot]) -> bool:
        raise ZeroDivisionError(members[0].id)

    async with engine_on(ScriptedBackend(by_speed(a=1, b=-1))) as engine:
        with pytest.raises(ZeroDivisionError, match="a/0"):
            await engine.collect([group("a"), group("b")], target=1, filter=judge)
        assert set(engine.places().values()) == {"completed", "resumable"}
        batch = await engine.collect(target=1)
        assert names(batch.groups) == ["a"]
        settled_once(engine)


async def test_the_source_is_asked_only_while_there_is_room() -> None:
    """At most max_groups under way; refilled as they settle; never asked after the stop."""
    asked = []

    def source() -> Iterator[list[RolloutRequest]]:
        for number in range(100):
            asked.append(number)
            yield group(f"g{number}")

    backend = ScriptedBackend(lambda _: [tokens(1), Pause(1), finish()])
    async with engine_on(backend) as engine:
        batch = await engine.collect(source(), target=6, max_groups=2)
        assert len(batch.groups) == 6
        assert len(asked) <= 8
        settled_once(engine)


async def test_max_in_flight_bounds_what_is_admitted() -> None:
    """No more rollouts are taken in than can be sent."""
    asked = []

    def source():
        for number in range(20):
            asked.append(number)
            yield group(f"g{number}")

    async with engine_on(ScriptedBackend(lambda _: [tokens(1), Hang()]), max_in_flight=4) as engine:
        with anyio.move_on_after(10):
            await engine.collect(source(), target=1)
        assert len(asked) == 2


async def test_an_async_source_survives_the_stop() -> None:
    """A generator that is waiting for data when the target is reached is not broken off, and loses nothing."""
    given = []

    async def source() -> AsyncIterator[list[RolloutRequest]]:
        for number in range(4):
            if number:
                await anyio.sleep(10)
            given.append(number)
            yield group(f"g{number}")

    feed = source()
    async with engine_on(ScriptedBackend(lambda _: [tokens(1), Pause(1), finish()])) as engine:
        first = await engine.collect(feed, target=1)
        assert names(first.groups) == ["g0"]
        await anyio.sleep(30)
        assert given == [0, 1], "the group that was on its way has arrived, and no other was asked for"
        second = await engine.collect(feed, target=1)
        assert names(second.groups) == ["g1"]
        third = await engine.collect(feed)
        assert names(third.groups) == ["g2", "g3"]
        assert third.reached
        settled_once(engine)


async def test_an_async_source_can_be_waited_for_again_while_it_still_owes_an_answer() -> None:
    """The next call with the same source takes over the pending question; its errors go there too."""

    async def source() -> AsyncIterator[list[RolloutRequest]]:
        yield group("a")
        await anyio.sleep(10)
        yield group("b")
        await anyio.sleep(10)
        raise ZeroDivisionError

    feed = source()
    async with engine_on(ScriptedBackend(simple(1))) as engine:
        assert names((await engine.collect(feed, target=1)).groups) == ["a"]
        assert names((await engine.collect(feed, target=1)).groups) == ["b"]
        assert names((await engine.collect([group("c")], target=1)).groups) == ["c"]
        await anyio.sleep(30)
        with pytest.raises(ZeroDivisionError):
            await engine.collect(feed, target=1)
        assert names((await engine.collect(feed)).groups) == []


async def test_a_source_that_raises_ends_the_call_and_loses_nothing() -> None:
    """What it had given before is carried."""

    def source():
        yield group("a")
        raise ZeroDivisionError

    async with engine_on(ScriptedBackend(simple(1))) as engine:
        with pytest.raises(ZeroDivisionError):
            await engine.collect(source(), target=2)
        assert names((await engine.collect()).groups) == ["a"]


async def test_a_group_that_does_not_fit_is_taken_in_whole_or_not_at_all() -> None:
    """A member that cannot be admitted leaves no siblings behind."""
    wrong = [*group("b")[:1], request("taken", group_id="b", group_size=2, index=1)]
    async with engine_on(ScriptedBackend(lambda _: [tokens(1), Hang()])) as engine:
        engine.submit(request("taken"))
        with pytest.raises(DuplicateRollout, match="taken"):
            await engine.collect([wrong])
        assert set(engine.places()) == {"taken"}
        with pytest.raises(ConfigurationError, match="group_size"):
            await engine.collect([group("c")[:1]])
        with pytest.raises(DuplicateRollout, match="being collected"):
            await engine.collect([group("d"), group("d")])
        assert set(engine.places()) == {"taken", "d/0", "d/1"}


async def test_one_collect_at_a_time() -> None:
    """A second one says so."""
    async with engine_on(ScriptedBackend(lambda _: [Hang()])) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.collect, [group("a")])
        await until(lambda: engine.core.flights)
        with pytest.raises(ConfigurationError, match="already running"):
            await engine.collect([group("b")])
        tasks.cancel_scope.cancel()


async def test_cancelling_collect_carries_everything() -> None:
    """The unfinished are aborted and kept; the next call goes on with them."""
    lines = Lines()
    backend = ScriptedBackend(by_speed(a=1, b=20))
    async with engine_on(backend, lines) as engine:
        with anyio.move_on_after(5) as scope:
            await engine.collect([group("a"), group("b")])
        assert scope.cancelled_caught
        assert sorted(engine.places().values()) == ["completed", "completed", "resumable", "resumable"]
        settled_once(engine)
        batch = await engine.collect()
        assert sorted(names(batch.groups)) == ["a", "b"]
        settled_once(engine)
    assert len(lines.of(GroupCarried)) == 2
    assert sorted(line["group_id"] for line in lines.of(GroupDelivered)) == ["a", "b"]


async def test_on_group_hands_groups_over_at_once() -> None:
    """Each delivered group is told while the others still run, plain or async, and is in the batch too."""
    told = []

    async def hear(members) -> None:
        await anyio.sleep(0.1)
        told.append((members[0].request.group, round(anyio.current_time() - began)))

    async with engine_on(ScriptedBackend(by_speed(a=1, b=5, c=1))) as engine:
        began = anyio.current_time()
        batch = await engine.collect([group("a"), group("b")], on_group=hear)
        assert told == [("a", 1), ("b", 5)]
        assert names(batch.groups) == ["a", "b"]
        await engine.collect([group("c", 1)], on_group=lambda members: told.append(members[0].id))
        assert told[-1] == "c/0"


async def test_on_group_that_raises_keeps_what_was_not_handed_over() -> None:
    """The one it was called with is delivered; the others are carried."""
    heard = []

    def hear(members) -> None:
        heard.append(members[0].request.group)
        raise ZeroDivisionError

    async with engine_on(ScriptedBackend(by_speed(a=1, b=-1))) as engine:
        with pytest.raises(ZeroDivisionError):
            await engine.collect([group("a"), group("b")], on_group=hear)
        assert heard == ["a"]
        assert set(engine.places()) == {"b/0", "b/1"}
        settled_once(engine)


async def test_carried_snapshots_can_be_given_by_the_source_again() -> None:
    """A source that hands back what was carried meets the rollouts that are held, and does not duplicate them."""
    backend = ScriptedBackend(by_speed(a=1, b=20))
    async with engine_on(backend) as engine:
        first = await engine.collect([group("a"), group("b")], target=1)
        second = await engine.collect([first.carried[0]], target=1)
        assert names(second.groups) == ["b"]
        assert [list(member.tokens) for member in second.groups[0]] == [[1, 1, 2]] * 2
        settled_once(engine)


async def test_finished_siblings_of_a_carried_group_are_untouched() -> None:
    """Only the unfinished members are run again."""

    def script(call):
        if call.rollout_id == "b/1":
            return [tokens(1), Pause(20), tokens(2), finish()]
        return [tokens(1), Pause(1), finish()]

    backend = ScriptedBackend(script)
    async with engine_on(backend) as engine:
        first = await engine.collect([group("a"), group("b")], target=1)
        assert [m.state for m in first.carried[0]] == [RolloutState.COMPLETED, RolloutState.ABORTED]
        before = len(backend.calls)
        await engine.collect()
        assert [call.rollout_id for call in backend.calls[before:]] == ["b/1"]


async def test_groups_of_final_snapshots_are_delivered_without_a_request() -> None:
    """A source of what is finished already needs no server."""
    backend = ScriptedBackend(simple(1))
    async with engine_on(backend) as engine:
        done = (await engine.collect([group("a")])).groups[0]
        calls = len(backend.calls)
        again = await engine.collect([done])
        assert names(again.groups) == ["a"]
        assert len(backend.calls) == calls
        settled_once(engine)


async def test_a_discarded_member_fails_its_group() -> None:
    """Giving one up while it is collected."""
    script = [tokens(1), Pause(5), finish()]
    async with (
        engine_on(ScriptedBackend(lambda _: script), max_in_flight=1) as engine,
        anyio.create_task_group() as tasks,
    ):

        async def give_up() -> None:
            await until(lambda: engine.core.flights)
            engine.discard("a/1")

        tasks.start_soon(give_up)
        batch = await engine.collect([group("a")])
        assert [m.state for m in batch.failed[0]] == [RolloutState.COMPLETED, RolloutState.DISCARDED]
        assert engine.places() == {}
        settled_once(engine)


async def test_policy_discard_gives_up_what_the_stop_aborts() -> None:
    """Their groups are failed, not carried; the tokens are wasted, by reason."""
    policy = Policy(on_abort=OnAbort.DISCARD)
    async with engine_on(ScriptedBackend(by_speed(a=1, b=-1)), policy=policy) as engine:
        batch = await engine.collect([group("a"), group("b")], target=1)
        assert names(batch.failed) == ["b"]
        assert batch.carried == ()
        assert engine.ledger().wasted == {"over_sampled": 2}
        settled_once(engine)


async def test_policy_restart_drops_the_tokens_at_the_resume() -> None:
    """The prefix is kept at rest and dropped, counted, when the rollout goes on."""
    backend = ScriptedBackend(by_speed(a=1, b=20))
    lines = Lines()
    async with engine_on(backend, lines, policy=Policy(on_abort=OnAbort.RESTART)) as engine:
        first = await engine.collect([group("a"), group("b")], target=1)
        assert {len(member.tokens) for member in first.carried[0]} == {1}
        second = await engine.collect()
        assert [list(member.tokens) for member in second.groups[0]] == [[1, 2]] * 2
        assert engine.ledger().dropped == {"resumed": 2}
        settled_once(engine)
    assert {line["dropped_tokens"] for line in lines.of(RolloutTransition, trigger="restore")} == {1}


async def test_groups_too_old_for_the_policy_are_stale() -> None:
    """max_staleness counts published versions at delivery."""

    def script(_call):
        return [tokens(1, version="1"), Pause(5), tokens(2, version="3"), finish()]

    policy = Policy(max_staleness=1)
    async with engine_on(ScriptedBackend(script), policy=policy, version="1") as engine:
        async with anyio.create_task_group() as tasks:

            async def update() -> None:
                await until(lambda: all(f.rollout.tokens for f in engine.core.flights.values()))
                for version in "23":
                    async with engine.weight_update(version, "in_place"):
                        pass

            tasks.start_soon(update)
            batch = await engine.collect([group("a")], target=1)
        assert names(batch.stale) == ["a"]
        assert {m.disposition for m in batch.stale[0]} == {Disposition.STALE}
        assert not batch.reached
        assert engine.ledger().wasted == {"stale": 4}


async def test_what_was_carried_too_often_goes_before_everything_else() -> None:
    """The starvation guard, by max_carries."""
    order = []

    def script(call):
        order.append(call.rollout_id)
        return [tokens(1), Pause(1), finish()] if call.rollout_id != "s/0" or len(order) > 9 else [Hang()]

    async with engine_on(ScriptedBackend(script), policy=Policy(max_carries=1), max_in_flight=1) as engine:
        with anyio.move_on_after(5):
            await engine.collect([group("s", 1)])
        assert engine.handle("s/0").rollout.carries == 1
        order.clear()
        for name in ("x", "y"):
            engine.submit(Snapshot.from_prefix(request(name), [1]))
        with anyio.move_on_after(5):
            await engine.collect(target=1)
        assert order[0] == "s/0"


async def test_an_outage_ends_a_collect_short() -> None:
    """Everything is carried and resumable; the source is not drunk up; a later call tries again."""
    out = True

    def script(_call):
        return [lost(Reason.UNREACHABLE)] if out else [tokens(1), finish()]

    asked = []

    def source():
        for number in range(50):
            asked.append(number)
            yield group(f"g{number}")

    async with engine_on(ScriptedBackend(script), unreachable_timeout=10.0, max_in_flight=4) as engine:
        feed = source()
        batch = await engine.collect(feed)
        assert not batch.reached
        assert len(batch.carried) == len(asked) == 2
        out = False
        again = await engine.collect(feed, target=5)
        assert again.reached
        assert sorted(names(again.groups))[:2] == ["g0", "g1"]
        settled_once(engine)


async def test_a_collect_on_an_engine_that_gave_up_tries_again() -> None:
    """Without anything carried the source is asked, and its first group is the probe."""
    out = True

    def script(_call):
        return [lost(Reason.UNREACHABLE)] if out else [tokens(1), finish()]

    async with engine_on(ScriptedBackend(script), unreachable_timeout=10.0) as engine:
        assert (await engine.generate(request())).reason is Reason.UNREACHABLE
        out = False
        batch = await engine.collect([group("b")], target=1)
        assert names(batch.groups) == ["b"]


async def test_closing_the_engine_ends_a_collect() -> None:
    """EngineClosed, and everything stays in the store as aborted."""
    lines, store = Lines(), MemoryStore()
    async with engine_on(ScriptedBackend(by_speed(a=-1)), lines, store=store) as engine:  # noqa: SIM117
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                with pytest.raises(EngineClosed):
                    await engine.collect([group("a")])

            tasks.start_soon(run)
            await until(lambda: engine.core.flights)
            await engine.close()
    assert lines.all[-1][0] == "engine.stopped"
    assert {row.state for row in store.pending()} == {"aborted"}


async def test_a_store_that_is_behind_holds_admission_back() -> None:
    """While the store refuses new rollouts none is asked for; they come later."""
    async with engine_on(ScriptedBackend(simple(1)), store=MemoryStore()) as engine:
        refusals = 3

        def admit() -> None:
            nonlocal refusals
            refusals -= 1
            if refusals > 0:
                raise StoreUnavailable("behind")

        writer = engine.core.recorder.storage.writer
        assert writer is not None
        writer.admit = admit  # type: ignore[method-assign]
        batch = await engine.collect([group("a")])
        assert names(batch.groups) == ["a"]
        assert refusals <= 0


async def test_a_store_that_dies_at_the_delivery_loses_nothing() -> None:
    """Nothing counts as delivered; all groups are carried, and the error comes out."""
    async with engine_on(ScriptedBackend(simple(1)), store=MemoryStore()) as engine:
        storage = engine.core.recorder.storage
        works = storage.durable

        async def broken() -> None:
            raise StoreUnavailable("dead")

        storage.durable = broken  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            await engine.collect([group("a"), group("b")], target=1)
        assert set(engine.places().values()) == {"completed"}
        with pytest.raises(StoreUnavailable):
            await engine.collect(target=1, on_group=print)
        storage.durable = works  # type: ignore[method-assign]
        batch = await engine.collect(target=2)
        assert len(batch.groups) == 2
        settled_once(engine)


async def test_a_member_that_was_waited_for_alone_is_not_delivered_again() -> None:
    """Whoever holds a handle of a carried rollout may take it out; its group is collected no more."""
    lines = Lines()
    async with engine_on(ScriptedBackend(by_speed(a=1, b=20)), lines) as engine:
        first = await engine.collect([group("a"), group("b")], target=1)
        handles = [engine.submit(member) for member in first.carried[0]]
        assert engine.core.rollouts["b/0"].disposition is Disposition.NONE
        assert [(await handle.wait()).state for handle in handles] == [RolloutState.COMPLETED] * 2
        assert (await engine.collect()).groups == ()
        again = await engine.collect([group("b")])
        assert names(again.groups) == ["b"]
        settled_once(engine)
    assert [line["group_id"] for line in lines.of(GroupDelivered)] == ["a", "b"]


async def test_a_wait_for_a_member_that_is_collected_does_not_deliver_it() -> None:
    """The collect decides; whoever waits sees the snapshot."""
    lines = Lines()
    async with engine_on(ScriptedBackend(by_speed(a=1, b=5)), lines) as engine:
        seen = []

        async def watch() -> None:
            await until(lambda: "a/0" in engine.places())
            seen.append(await engine.handle("a/0").wait())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            batch = await engine.collect([group("a"), group("b")])
        assert seen[0].disposition is Disposition.NONE
        assert sorted(names(batch.groups)) == ["a", "b"]
    assert len([line for line in lines.of(RolloutDisposition) if line["rollout_id"] == "a/0"]) == 1


async def test_an_id_is_free_again_when_its_group_was_handed_over() -> None:
    """Also within one call."""
    async with engine_on(ScriptedBackend(simple(1))) as engine:
        told = []

        async def source():
            yield group("a")
            await until(lambda: told)
            yield group("a")

        batch = await engine.collect(source(), on_group=lambda members: told.append(members[0].id))
        assert names(batch.groups) == ["a", "a"]
        settled_once(engine)


async def test_a_group_that_arrives_in_the_very_moment_of_the_stop_is_kept() -> None:
    """Whoever is first, nothing is lost."""
    for _ in range(5):
        arrives = anyio.Event()

        async def source(arrives=arrives):
            yield group("a")
            await arrives.wait()
            yield group("b")

        def judge(_members, arrives=arrives) -> bool:
            arrives.set()
            return True

        async with engine_on(ScriptedBackend(lambda _: [tokens(1), Pause(1), finish()])) as engine:
            feed = source()
            first = await engine.collect(feed, target=1, filter=judge)
            assert names(first.groups) == ["a"]
            second = await engine.collect(feed, target=1)
            assert names(second.groups) == ["b"]


async def test_two_exceptions_come_out_together() -> None:
    """A filter and a source that fail at once are a group; one alone is itself."""

    def source():
        yield group("a", 1)
        yield group("b", 1)

    async def judge(_members) -> bool:
        await anyio.sleep(1)
        raise ZeroDivisionError

    async with engine_on(ScriptedBackend(simple(1))) as engine:
        with pytest.raises((ZeroDivisionError, BaseExceptionGroup)) as caught:
            await engine.collect(source(), filter=judge)
        error = caught.value
        assert isinstance(error, ZeroDivisionError) or len(error.exceptions) == 2
