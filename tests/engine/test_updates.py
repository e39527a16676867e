"""Weight updates in three modes, over the gate, with servers that answer, refuse, die or hang."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from lifecycle.backend import ReceiptStatus, WorkerReceipt
from lifecycle.errors import UpdateTimeout
from lifecycle.events import VersionSpan
from lifecycle.log.records import GateReceipt, GateTransition, RolloutTransition
from lifecycle.policy import OnAbort, Policy
from lifecycle.snapshot import Snapshot
from lifecycle.states import GateState, Outcome, Reason, RolloutState
from lifecycle.testing.backend import Hang, Pause, ScriptedBackend, finish, lost, tokens
from tests.support.driving import Lines, engine_on, request, scripts, simple, until

pytestmark = pytest.mark.anyio


def two_halves(call):
    """A first attempt that hangs after a token of version 1, then one that finishes with version 2."""
    return [tokens(1, version="1"), Hang()] if call.attempt == 1 else [tokens(2, version="2"), finish()]


def gates(lines: Lines) -> list[str]:
    """The gate's way."""
    return [f"{line['trigger']} {line['dest']}" for line in lines.of(GateTransition)]


async def test_abort_mode_brings_ours_to_rest_and_resumes_them() -> None:
    """Paused while weights change, the label published, partials first, spans of both versions."""
    lines, backend = Lines(), ScriptedBackend(two_halves)
    async with engine_on(backend, lines, version="1", max_in_flight=1) as engine:
        handle, fresh = engine.submit(request("a")), engine.submit(request("b"))
        await until(lambda: handle.state is RolloutState.PARTIAL)
        async with engine.weight_update("2"):
            assert engine.stats().gate == "paused"
            assert engine.core.flights == {}
            assert handle.state is RolloutState.PENDING
            assert engine.version == "1"
        assert engine.version == "2"
        done = await handle.wait()
        assert done.spans == (VersionSpan("1", 0, 1, "label"), VersionSpan("2", 1, 2, "label"))
        assert done.weight_versions[1]["version"] == "2"
        await fresh.abort()
    assert [call.rollout_id for call in backend.calls][:2] == ["a", "a"]
    assert gates(lines) == ["pause pausing", "settle paused", "resume open", "close closed"]
    assert lines.of(RolloutTransition, rollout_id="a", trigger="restore")[0]["reason"] == "weight_update"
    assert [line["action"] for line in lines.of(GateReceipt)] == ["loads", "resume"]
    assert lines.of(GateTransition)[2]["current_version"] == "2"
    assert backend.log[:2] == ["abort", "resume 2 True"]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_pausing_modes_stop_the_servers_and_leave_the_streams(mode: str) -> None:
    """Requests stay in flight; the servers are paused, labelled and continued."""
    lines = Lines()
    backend = ScriptedBackend(lambda _: [tokens(1, version="1"), Pause(10), tokens(2, version="2"), finish()])
    async with engine_on(backend, lines, version="1") as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        async with engine.weight_update("2", mode):
            assert handle.state is RolloutState.PARTIAL
            assert engine.stats().gate == "paused"
            waiting = engine.submit(request("b"))
            await anyio.sleep(5)
            assert waiting.state is RolloutState.PENDING
        done = await handle.wait()
        assert [span.version for span in done.spans] == ["1", "2"]
        assert done.attempt == 1
    assert backend.log[:2] == [f"pause {mode} True", "resume 2 True"]
    assert [line["action"] for line in lines.of(GateReceipt)] == [f"pause_{mode}", "resume"]


async def test_an_unknown_mode_is_refused() -> None:
    """Before anything is paused."""
    async with engine_on(ScriptedBackend(simple(1))) as engine:
        with pytest.raises(ValueError, match="sideways"):
            engine.weight_update("2", "sideways")
        assert engine.stats().gate == "open"


async def test_a_failure_inside_leaves_the_gate_paused_and_the_servers_running() -> None:
    """The exception goes on, no label is published; resume() opens the gate and partials go on."""
    lines, backend = Lines(), ScriptedBackend(two_halves)
    async with engine_on(backend, lines, version="1") as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        with pytest.raises(ZeroDivisionError):
            async with engine.weight_update("2", "in_place"):
                raise ZeroDivisionError
        assert backend.log == ["pause in_place True", "resume None True"]
        assert engine.version == "1"
        assert engine.stats().gate == "paused"
        with pytest.raises(ZeroDivisionError):
            async with engine.weight_update("2"):
                raise ZeroDivisionError
        assert handle.state is RolloutState.PENDING
        await anyio.sleep(10)
        assert handle.state is RolloutState.PENDING
        engine.resume()
        assert (await handle.wait()).state is RolloutState.COMPLETED
    assert gates(lines)[:5] == [
        "pause pausing",
        "settle paused",
        "pause paused",
        "settle paused",
        "resume open",
    ]


async def test_an_update_after_a_failed_one_opens_the_gate() -> None:
    """The second try succeeds from paused."""
    async with engine_on(ScriptedBackend(simple(1))) as engine:
        with pytest.raises(ZeroDivisionError):
            async with engine.weight_update("2"):
                raise ZeroDivisionError
        async with engine.weight_update("2"):
            pass
        assert engine.stats().gate == "open"
        assert (await engine.generate(request())).state is RolloutState.COMPLETED


async def test_a_cancellation_inside_runs_the_servers_and_goes_on() -> None:
    """Shielded and bounded."""
    backend = ScriptedBackend(simple(1))
    async with engine_on(backend) as engine:
        with anyio.move_on_after(1) as scope:
            async with engine.weight_update("2", "retract"):
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert backend.log == ["pause retract True", "resume None True"]


async def test_a_cancellation_while_settling_opens_the_gate_and_goes_on() -> None:
    """What was asked to end comes to rest and is restored."""
    backend = ScriptedBackend(scripts(a=[[tokens(1), Hang()], [tokens(2), finish()]]))
    backend.deaf = True
    async with engine_on(backend, abort_timeout=10.0) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        with anyio.move_on_after(2) as scope:
            async with engine.weight_update("2"):
                raise AssertionError("never entered")
        assert scope.cancelled_caught
        assert engine.stats().gate == "open"
        assert list((await handle.wait()).tokens) == [1, 2]


async def test_one_dead_worker_does_not_hang_the_update() -> None:
    """Settled when every live worker has acknowledged; the dead one is in the log."""

    class Half(ScriptedBackend):
        async def pause(self, mode, *, deadline):
            return [
                *await super().pause(mode, deadline=deadline),
                WorkerReceipt("w2", ReceiptStatus.UNREACHABLE),
            ]

    lines = Lines()
    async with engine_on(Half(simple(1)), lines) as engine, engine.weight_update("2", "in_place"):
        pass
    assert [line["status"] for line in lines.of(GateReceipt)] == ["accepted", "unreachable", "accepted"]


async def test_a_worker_that_refuses_to_pause_is_asked_again() -> None:
    """Until it accepts."""

    class Stubborn(ScriptedBackend):
        async def pause(self, mode, *, deadline):
            self.pause_status = ReceiptStatus.REFUSED if len(self.log) < 3 else ReceiptStatus.ACCEPTED
            return await super().pause(mode, deadline=deadline)

    backend = Stubborn(simple(1))
    async with engine_on(backend) as engine, engine.weight_update("2", "in_place"):
        pass
    assert len(backend.log) == 5


@pytest.mark.parametrize("status", [ReceiptStatus.REFUSED, ReceiptStatus.UNREACHABLE])
async def test_an_update_that_cannot_settle_times_out(status: ReceiptStatus) -> None:
    """UpdateTimeout says what is missing; the servers run, the gate is open again."""
    lines, backend = Lines(), ScriptedBackend(simple(1))
    backend.pause_status = status
    async with engine_on(backend, lines) as engine:
        with pytest.raises(UpdateTimeout, match="not every worker has paused; the gate is open again"):
            async with engine.weight_update("2", "in_place", timeout=3.0):
                raise AssertionError("never entered")
        assert engine.stats().gate == "open"
        assert engine.version is None
        assert backend.log[-1] == "resume None True"
        assert (await engine.generate(request())).state is RolloutState.COMPLETED
    assert lines.of(GateTransition)[1]["reason"] == "could not settle"


async def test_a_deaf_server_cannot_hold_an_update_beyond_the_abort_deadline() -> None:
    """The streams are closed then: expired, restored, and the update goes on."""
    lines = Lines()
    backend = ScriptedBackend(scripts(a=[[tokens(1), Hang()], [tokens(2), finish()]]))
    backend.deaf = True
    async with engine_on(backend, lines, abort_timeout=5.0) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        began = anyio.current_time()
        async with engine.weight_update("2"):
            assert anyio.current_time() - began == pytest.approx(5.0, abs=0.01)
        assert list((await handle.wait()).tokens) == [1, 2]
    assert lines.of(RolloutTransition, trigger="expire")[0]["reason"] == "weight_update"


async def test_an_abort_update_can_time_out_too() -> None:
    """How many are still in flight is said; they come to rest and go on afterwards."""
    backend = ScriptedBackend(scripts(a=[[tokens(1), Hang()], [tokens(2), finish()]]))
    backend.deaf = True
    async with engine_on(backend, abort_timeout=50.0) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        with pytest.raises(UpdateTimeout, match="1 rollouts are still in flight"):
            async with engine.weight_update("2", timeout=2.0):
                raise AssertionError("never entered")
        assert list((await handle.wait()).tokens) == [1, 2]


async def test_a_second_update_waits_for_the_first() -> None:
    """In the order in which they came."""
    order = []
    async with engine_on(ScriptedBackend(simple(1))) as engine:

        async def update(version: str) -> None:
            async with engine.weight_update(version):
                order.append(f"in {version}")
                await anyio.sleep(1)
                order.append(f"out {version}")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(update, "2")
            await anyio.sleep(0.5)
            tasks.start_soon(update, "3")
        assert engine.version == "3"
    assert order == ["in 2", "out 2", "in 3", "out 3"]


async def test_abort_deadlines_start_when_the_servers_run() -> None:
    """While paused a server cannot answer an abort; the time-out counts from the resume on."""
    backend = ScriptedBackend(lambda _: [tokens(1), Hang()])
    backend.deaf = True
    async with engine_on(backend) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        reports = []

        async def abort() -> None:
            reports.append(await handle.abort(timeout=5.0))

        async with anyio.create_task_group() as tasks:
            async with engine.weight_update("2", "in_place"):
                tasks.start_soon(abort)
                await anyio.sleep(100)
                assert handle.state is RolloutState.ABORTING
            resumed = anyio.current_time()
        assert anyio.current_time() - resumed == pytest.approx(5.0, abs=0.01)
        assert reports[0].outcomes == {"a": Outcome.EXPIRED}


async def test_exclusive_ends_everything_and_waits_for_empty_servers() -> None:
    """abort_all is used, also where nothing is ours, until the loads are zero."""

    class Busy(ScriptedBackend):
        async def workers(self, *, deadline):
            await anyio.lowlevel.checkpoint()
            foreign = max(0, 3 - self.log.count("abort_all"))
            return [WorkerReceipt("w", ReceiptStatus.ACCEPTED, running=foreign, waiting=None)]

    backend = Busy(simple(1))
    async with engine_on(backend) as engine, engine.weight_update("2", exclusive=True):
        assert backend.log == ["abort_all"] * 3
    shared = Busy(simple(1))
    async with engine_on(shared) as engine, engine.weight_update("2"):
        assert shared.log == []


async def test_exclusive_uses_the_server_wide_abort_for_ours() -> None:
    """One call for all."""
    backend = ScriptedBackend(two_halves)
    async with engine_on(backend) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        async with engine.weight_update("2", exclusive=True):
            assert backend.log == ["abort_all"]
        await handle.wait()


async def test_a_callers_abort_during_an_update_wins() -> None:
    """What the update was going to restore stays at rest."""
    backend = ScriptedBackend(lambda _: [tokens(1), Hang()])
    backend.deaf = True
    async with engine_on(backend, abort_timeout=5.0) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        async with anyio.create_task_group() as tasks:

            async def update() -> None:
                async with engine.weight_update("2"):
                    pass

            tasks.start_soon(update)
            await until(lambda: handle.state is RolloutState.ABORTING)
            report = await handle.abort(reason=Reason.OVER_SAMPLED)
        assert report.outcomes == {"a": Outcome.EXPIRED}
        await anyio.sleep(20)
        assert handle.state is RolloutState.ABORTED
        assert handle.snapshot().reason is Reason.OVER_SAMPLED


async def test_an_abort_that_was_on_its_way_is_waited_for() -> None:
    """The update does not ask again for what was asked to end before."""
    lines, backend = Lines(), ScriptedBackend(lambda _: [tokens(1), Hang()])
    backend.deaf = True
    async with engine_on(backend, lines, abort_timeout=5.0) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(handle.abort)
            await anyio.sleep(1)
            async with engine.weight_update("2"):
                assert handle.state is RolloutState.ABORTED
    assert lines.walk("a").count("abort aborting") == 1


async def test_closing_during_an_update() -> None:
    """The gate is closed, and the update leaves in order."""
    lines = Lines()
    async with engine_on(ScriptedBackend(simple(1)), lines) as engine, engine.weight_update("2"):
        await engine.close()
    assert engine.core.gate.state is GateState.CLOSED
    assert gates(lines) == ["pause pausing", "settle paused", "close closed"]


@pytest.mark.parametrize(
    ("on_abort", "state", "held"),
    [
        (OnAbort.KEEP, RolloutState.COMPLETED, [1, 2]),
        (OnAbort.RESTART, RolloutState.COMPLETED, [2]),
        (OnAbort.DISCARD, RolloutState.DISCARDED, [1]),
    ],
)
async def test_the_policy_says_what_an_update_does_to_a_prefix(
    on_abort: OnAbort, state: RolloutState, held: list[int]
) -> None:
    """Keep, restart from the prompt, or give it up; the ledger counts what is dropped."""
    backend = ScriptedBackend(two_halves)
    async with engine_on(backend, version="1") as engine:
        handle = engine.submit(request(), policy=Policy(on_abort=on_abort))
        await until(lambda: handle.state is RolloutState.PARTIAL)
        async with engine.weight_update("2"):
            pass
        done = await handle.wait()
        assert done.state is state
        assert list(done.tokens) == held
        ledger = engine.ledger()
        assert ledger.balanced
        assert ledger.dropped == ({"weight_update": 1} if on_abort is OnAbort.RESTART else {})


async def test_tokens_older_than_allowed_are_dropped_at_the_update() -> None:
    """max_staleness=0: one published version later a prefix is started again, reason stale."""
    lines, backend = Lines(), ScriptedBackend(two_halves)
    async with engine_on(backend, lines, version="1", policy=Policy(max_staleness=0)) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        async with engine.weight_update("2"):
            pass
        assert list((await handle.wait()).tokens) == [2]
        assert engine.ledger().dropped == {"stale": 1}
        assert engine.ledger().balanced
    assert lines.walk("a")[3:7] == [
        "confirm aborted",
        "restore pending",
        "abort aborted",
        "restore pending",
    ]


async def test_tokens_older_than_allowed_are_dropped_at_a_retry_and_at_a_resume() -> None:
    """In flight over an update in place, then lost; or submitted again from a snapshot."""
    backend = ScriptedBackend(
        scripts(
            a=[[tokens(1, version="1"), Pause(5), lost()], [tokens(2, version="2"), finish()]],
            b=[[tokens(3, version="2"), finish()]],
        )
    )
    async with engine_on(backend, version="1", policy=Policy(max_staleness=0)) as engine:
        handle = engine.submit(request("a"))
        await until(lambda: handle.state is RolloutState.PARTIAL)
        async with engine.weight_update("2", "in_place"):
            pass
        assert list((await handle.wait()).tokens) == [2]
        old = Snapshot.from_prefix(request("b"), [9], None, "1")
        assert list((await engine.generate(old)).tokens) == [3]
        assert engine.ledger().dropped == {"stale": 2}
        fresh = Snapshot.from_prefix(request("c", max_new_tokens=1), [9], None, "2")
        assert list((await engine.generate(fresh)).tokens) == [9]


async def test_an_abort_in_a_pause_is_kept_back_until_the_scheduler_must_have_seen_the_request() -> None:
    """What has shown a token is told at once, the rest when the servers run again: SGLang loses an earlier one."""
    backend = ScriptedBackend(scripts(fresh=[[Hang()]], begun=[[tokens(1), Hang()]]))
    async with engine_on(backend) as engine, anyio.create_task_group() as tasks:
        fresh, begun = engine.submit(request("fresh")), engine.submit(request("begun"))
        await until(lambda: begun.state is RolloutState.PARTIAL and fresh.state is RolloutState.STREAMING)
        async with engine.weight_update("2", "in_place"):
            tasks.start_soon(engine.abort)
            await anyio.sleep(60)
            assert begun.state is RolloutState.ABORTED
            assert fresh.state is RolloutState.ABORTING
            assert backend.log == ["pause in_place True", "abort"]
        assert (await fresh.wait()).outcome is Outcome.CONFIRMED
        assert backend.log[2:] == ["resume 2 True", "abort"]


async def test_a_version_that_others_have_published_counts_too() -> None:
    """What waits with tokens too old for its policy begins again."""
    lines, backend = Lines(), ScriptedBackend(scripts(a=[[tokens(2, version="2"), finish()]]))
    async with engine_on(backend, lines, version="1", policy=Policy(max_staleness=0)) as engine:
        handle = engine.submit(Snapshot.from_prefix(request(), [9], None, "1"))
        engine.note_version("2")
        assert engine.version == "2"
        assert list((await handle.wait()).tokens) == [2]
        assert engine.ledger().dropped == {"stale": 1}
