"""Aborts: in every state, answered, refused, unanswered, and repeated."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from lifecycle.backend import AbortReceipt, ReceiptStatus
from lifecycle.errors import ConfigurationError
from lifecycle.events import EndKind, StreamEnd
from lifecycle.log.records import AbortSent, RolloutRest, RolloutTransition
from lifecycle.states import FinishReason, Outcome, Reason, RolloutState
from lifecycle.testing.backend import WORKER, Hang, Pause, ScriptedBackend, finish, tokens
from tests.support.driving import Lines, engine_on, group, request, scripts, simple, until

pytestmark = pytest.mark.anyio

HANGING = lambda _: [tokens(1), Hang()]  # noqa: E731  a script


async def test_an_abort_of_what_is_pending_sends_nothing() -> None:
    """Outcome never_sent, at rest at once."""
    lines, backend = Lines(), ScriptedBackend(HANGING)
    async with engine_on(backend, lines, max_in_flight=1) as engine:
        engine.submit(request("a"))
        waiting = engine.submit(request("b"))
        await until(lambda: engine.core.flights)
        report = await waiting.abort(reason="not today")
        assert report.outcomes == {"b": Outcome.NEVER_SENT}
        assert report.empty == ("b",)
        assert report.elapsed_s == 0
        assert backend.aborted == []
        assert waiting.snapshot().reason is Reason.REQUESTED
    assert lines.walk("b") == ["abort aborted"]


async def test_an_abort_before_the_first_token_is_confirmed() -> None:
    """streaming, aborting, aborted: nothing is kept."""
    lines, backend = Lines(), ScriptedBackend(lambda _: [[], Hang()])
    async with engine_on(backend, lines) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.STREAMING)
        report = await handle.abort()
        assert report.outcomes == {"a": Outcome.CONFIRMED}
        assert report.counts == {"confirmed": 1}
        assert report.empty == ("a",)
        assert report.leaks == ()
        assert report.receipts[0].worker == WORKER
    assert lines.walk("a") == ["dispatch streaming", "abort aborting", "confirm aborted"]
    sent = lines.of(AbortSent)[0]
    assert (sent["rollouts"], sent["status"], sent["round"], sent["pending"]) == (1, "accepted", 1, 1)


async def test_tokens_that_arrive_while_aborting_are_kept() -> None:
    """Appended, not logged as transitions, and counted."""
    backend = ScriptedBackend(lambda _: [tokens(1), Pause(5), tokens(2, 3), Hang()])
    lines = Lines()
    async with engine_on(backend, lines) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        backend.deaf = True
        report = await handle.abort(timeout=10)
        assert list(handle.snapshot().tokens) == [1, 2, 3]
        assert report.kept == ("a",)
        assert engine.ledger().observed == 3
    assert lines.walk("a")[-2:] == ["abort aborting", "expire aborted"]


async def test_a_finish_that_beats_the_abort_is_a_finish() -> None:
    """The rollout is completed, the outcome finished."""
    backend = ScriptedBackend(lambda _: [tokens(1), Hang(finish())])
    async with engine_on(backend) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        report = await handle.abort()
        assert report.outcomes == {"a": Outcome.FINISHED}
        assert (await handle.wait()).finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("end", "outcome", "state"),
    [
        (StreamEnd(EndKind.LOST, Reason.DISCONNECTED), Outcome.LOST, RolloutState.ABORTED),
        (StreamEnd(EndKind.REJECTED, Reason.REFUSED), Outcome.REJECTED, RolloutState.FAILED),
        (StreamEnd(EndKind.REFUSED, Reason.REFUSED, status=400), Outcome.CONFIRMED, RolloutState.ABORTED),
    ],
)
async def test_other_ends_of_an_aborted_stream(end: StreamEnd, outcome: Outcome, state: RolloutState) -> None:
    """Lost and rejected say so; a status-code abort confirms."""
    async with engine_on(ScriptedBackend(lambda _: [tokens(1), Hang(end)])) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        assert (await handle.abort(reason=Reason.OVER_SAMPLED)).outcomes == {"a": outcome}
        snapshot = handle.snapshot()
        assert snapshot.state is state
        assert snapshot.reason is (Reason.OVER_SAMPLED if state is RolloutState.ABORTED else Reason.REFUSED)
        assert engine.stats().aborts == {str(outcome): 1}


async def test_a_refused_abort_closes_the_stream_at_once() -> None:
    """No worker accepted it: there is nothing to wait for; expired, and said so."""
    lines, backend = Lines(), ScriptedBackend(HANGING)
    backend.abort_status = ReceiptStatus.REFUSED
    async with engine_on(backend, lines) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        report = await handle.abort(timeout=30)
        assert report.outcomes == {"a": Outcome.EXPIRED}
        assert report.leaks == ("a",)
        assert report.elapsed_s < 0.1
        await until(lambda: not backend.live)
        assert handle.snapshot().detail == "abort_refused"
        assert handle.snapshot().reason is Reason.REQUESTED


async def test_an_abort_once_accepted_waits_although_a_later_one_is_refused() -> None:
    """A worker that restarts under a re-send does not make an accepted abort a refused one."""
    backend = ScriptedBackend(HANGING)
    backend.deaf = True
    async with engine_on(backend) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)

        async def turn() -> None:
            await until(lambda: backend.aborted)
            backend.abort_status = ReceiptStatus.UNREACHABLE

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turn)
            report = await handle.abort(timeout=10)
        assert report.elapsed_s == pytest.approx(10, abs=0.01)
        assert handle.snapshot().detail == "abort_deadline"


async def test_a_deaf_server_costs_the_deadline_and_no_more() -> None:
    """Re-sent with growing pauses, then the stream is closed: expired, a possible leak."""
    lines, backend = Lines(), ScriptedBackend(HANGING)
    backend.deaf = True
    async with engine_on(backend, lines, abort_resend=0.5, abort_resend_max=4.0) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        report = await handle.abort(timeout=20.0)
        assert report.elapsed_s == pytest.approx(20.0, abs=0.01)
        assert report.leaks == ("a",)
        await until(lambda: not backend.live)
        assert handle.snapshot().state is RolloutState.ABORTED
    rounds = [line["round"] for line in lines.of(AbortSent)]
    assert rounds == list(range(1, 9)), "at 0, 0.5, 1.5, 3.5, 7.5, 11.5, 15.5, 19.5 s"
    assert lines.of(RolloutTransition, trigger="expire")[0]["outcome"] == "expired"


async def test_an_abort_that_overtakes_its_request_is_sent_again() -> None:
    """The first is accepted and dropped; the second ends it."""

    class Late(ScriptedBackend):
        async def abort(self, calls, *, deadline, everything=False):
            self.deaf = not self.aborted
            return await super().abort(calls, deadline=deadline, everything=everything)

    backend = Late(HANGING)
    async with engine_on(backend, abort_resend=0.5) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        report = await handle.abort()
        assert report.outcomes == {"a": Outcome.CONFIRMED}
        assert report.elapsed_s == pytest.approx(0.5, abs=0.01)
        assert len(backend.aborted) == 2
        assert [receipt.rids for receipt in report.receipts] == [(handle.rollout.rid,)] * 2


async def test_repeated_aborts_are_logged_and_change_nothing() -> None:
    """While aborting, at rest, and after the end."""
    lines, backend = Lines(), ScriptedBackend(scripts(a=[[tokens(1), Hang()]], b=[[tokens(1), finish()]]))
    async with engine_on(backend, lines) as engine:
        handle = engine.submit(request("a"))
        await until(lambda: handle.state is RolloutState.PARTIAL)
        reports = []

        async def once() -> None:
            reports.append(await handle.abort())

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(once)
        assert [report.outcomes["a"] for report in reports] == [Outcome.CONFIRMED] * 3
        assert (await handle.abort()).outcomes["a"] is Outcome.CONFIRMED
        done = engine.submit(request("b"))
        await done.wait()
        assert (await done.abort()).outcomes == {"b": Outcome.FINISHED}
        assert done.state is RolloutState.COMPLETED
        failed = engine.submit(request("c", max_new_tokens=0))
        await failed.wait()
        assert len(backend.aborted) == 1
    walk = lines.walk("a")
    assert walk.count("abort aborting") == 3
    assert walk.count("abort aborted") == 1
    assert len(lines.of(RolloutRest, rollout_id="a")) == 1
    assert lines.walk("b")[-1] == "abort completed"


async def test_a_second_ask_can_only_bring_the_deadline_forward() -> None:
    """Whoever is in a hurry wins."""
    backend = ScriptedBackend(HANGING)
    backend.deaf = True
    async with engine_on(backend) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: engine.abort([handle], timeout=50))
            await anyio.sleep(1)
            await handle.abort(timeout=2)
        assert anyio.current_time() - began == pytest.approx(3, abs=0.01)


async def test_abort_has_a_scope() -> None:
    """By handle, by id, by group, or all of ours; never both."""
    backend = ScriptedBackend(HANGING)
    async with engine_on(backend) as engine:
        handles = {
            one.id: engine.submit(one) for one in (*group("g"), *group("h"), request("x"), request("y"))
        }
        await until(lambda: all(handle.state is RolloutState.PARTIAL for handle in handles.values()))
        assert set((await engine.abort(group="g")).outcomes) == {"g/0", "g/1"}
        assert set((await engine.abort("x")).outcomes) == {"x"}
        assert set((await engine.abort([handles["y"], "h/0"])).outcomes) == {"y", "h/0"}
        assert set((await engine.abort()).outcomes) == {"h/1"}
        assert (await engine.abort()).outcomes == {}
        with pytest.raises(ConfigurationError, match="holds no rollout"):
            await engine.abort("nobody")
        with pytest.raises(ConfigurationError, match="not both"):
            await engine.abort("x", group="g")
    assert "abort_all" not in backend.log


async def test_the_server_wide_abort_must_be_asked_for_by_name() -> None:
    """It ends ours too, and is sent also where nothing of ours is in flight."""
    backend = ScriptedBackend(HANGING)
    async with engine_on(backend) as engine:
        empty = await engine.abort_all_on_servers()
        assert (len(empty.receipts), empty.outcomes) == (1, {})
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        report = await engine.abort_all_on_servers(reason="clean up")
        assert report.outcomes == {"a": Outcome.CONFIRMED}
        await engine.abort()
    assert backend.log == ["abort_all", "abort_all"]


async def test_a_backend_whose_abort_raises_or_hangs_counts_as_unreachable() -> None:
    """The stream is closed at once, and other aborts go on."""

    class Broken(ScriptedBackend):
        async def abort(self, calls, *, deadline, everything=False):
            self.aborted += [call.rid for call in calls]
            if len(self.aborted) == 1:
                raise ZeroDivisionError
            await anyio.sleep_forever()

    lines, backend = Lines(), Broken(HANGING)
    async with engine_on(backend, lines, control_timeout=3.0) as engine:
        for name in ("a", "b"):
            handle = engine.submit(request(name))
            await until(lambda handle=handle: handle.state is RolloutState.PARTIAL)
            assert (await handle.abort()).outcomes == {name: Outcome.EXPIRED}
    assert [line["detail"] for line in lines.of(AbortSent)] == [
        "the backend raised ZeroDivisionError",
        "no answer within 3 s",
    ]


async def test_a_receipt_that_does_not_speak_of_a_rid_decides_nothing() -> None:
    """Only what a worker said of this request counts."""

    class Vague(ScriptedBackend):
        async def abort(self, calls, *, deadline, everything=False):
            await anyio.lowlevel.checkpoint()
            self.aborted.append("asked")
            return [AbortReceipt(WORKER, ReceiptStatus.REFUSED, ())]

    async with engine_on(Vague(HANGING)) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        report = await handle.abort(timeout=4.0)
        assert report.elapsed_s == pytest.approx(4.0, abs=0.01)


async def test_a_hundred_aborts_go_out_as_one_batch() -> None:
    """Asked in one step, sent in one call."""
    lines, backend = Lines(), ScriptedBackend(HANGING)
    async with engine_on(backend, lines) as engine:
        for number in range(100):
            engine.submit(request(f"r{number}"))
        await until(
            lambda: all(f.rollout.tokens for f in engine.core.flights.values()) and engine.core.flights
        )
        report = await engine.abort()
        assert report.counts == {"confirmed": 100}
        assert engine.stats().aborts_unresolved == 0
    assert [line["rollouts"] for line in lines.of(AbortSent)] == [100]


async def test_cancelling_an_abort_does_not_take_it_back() -> None:
    """The wait is abandoned; the rollouts come to rest all the same."""
    backend = ScriptedBackend(HANGING)
    backend.deaf = True
    async with engine_on(backend) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        with anyio.move_on_after(1):
            await handle.abort(timeout=5.0)
        assert handle.state is RolloutState.ABORTING
        assert (await handle.wait()).outcome is Outcome.EXPIRED
        assert engine.core.flights == {}


async def test_reasons_in_words_are_mapped_or_called_requested() -> None:
    """`over-sampled` is a reason; other words are logged as an ask."""
    async with engine_on(ScriptedBackend(simple(1)), max_in_flight=1) as engine:
        first, second = engine.submit(request("a")), engine.submit(request("b"))
        await engine.abort([first], reason="over-sampled")
        await engine.abort([second], reason="because of the weather")
        assert first.snapshot().reason is Reason.OVER_SAMPLED
        assert second.snapshot().reason is Reason.REQUESTED
        assert second.snapshot().detail == "because of the weather"
