"""Attempts: retries with back-off, what counts, outages, stalls, and what an abort meanwhile means."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from lifecycle.engine import LifecycleEngine
from lifecycle.errors import BackendUnreachable, ConfigurationError, SnapshotError
from lifecycle.events import EndKind, StreamEnd
from lifecycle.log.records import BackendOutage, BackendRecovered, RolloutRest, RolloutTransition
from lifecycle.policy import Policy
from lifecycle.snapshot import Snapshot
from lifecycle.states import Outcome, Reason, RolloutState
from lifecycle.testing.backend import Hang, Pause, ScriptedBackend, finish, lost, tokens
from tests.support.driving import Lines, engine_on, request, scripts, simple, until

pytestmark = pytest.mark.anyio

PREEMPTED = StreamEnd(EndKind.ENDED, Reason.SERVER_ABORT, "Aborted")


async def test_a_lost_attempt_is_tried_again_behind_its_tokens() -> None:
    """A new rid, the kept tokens in front, the reason in the log."""
    lines = Lines()
    backend = ScriptedBackend(scripts(a=[[tokens(1, 2), lost()], [tokens(3), finish()]]))
    async with engine_on(backend, lines) as engine:
        done = await engine.generate(request())
    assert list(done.tokens) == [1, 2, 3]
    assert lines.walk("a") == [
        "dispatch streaming",
        "observe partial",
        "lose aborted",
        "restore pending",
        "dispatch streaming",
        "observe partial",
        "finish completed",
    ]
    assert backend.calls[0].rid != backend.calls[1].rid
    assert [attempt.trigger for attempt in done.attempts] == ["lose", "finish"]
    assert [(attempt.start, attempt.end) for attempt in done.attempts] == [(0, 2), (2, 3)]


async def test_back_off_grows_with_attempts_without_tokens_and_is_jittered() -> None:
    """Each wait in pending is the doubled back-off times a factor in [0.5, 1)."""
    lines = Lines()
    policy = Policy(backoff_initial=1.0, backoff_max=4.0, max_attempts=6)
    backend = ScriptedBackend(lambda _: [lost(Reason.TRUNCATED)])
    async with engine_on(backend, lines, policy=policy) as engine:
        done = await engine.generate(request())
    assert done.state is RolloutState.FAILED
    assert done.reason is Reason.ATTEMPTS
    assert done.fruitless == 6
    waits = [line["dwell_s"] for line in lines.of(RolloutTransition, trigger="dispatch")][1:]
    assert len(waits) == 5
    for wait, longest in zip(waits, [1, 2, 4, 4, 4], strict=True):
        assert longest / 2 <= wait <= longest + 0.01
    assert lines.walk("a")[-2:] == ["lose aborted", "exhaust failed"]


async def test_only_consecutive_attempts_without_tokens_count() -> None:
    """One token starts the count again."""
    plays = [[lost(Reason.TRUNCATED)], [tokens(1), lost(Reason.TRUNCATED)]] * 4 + [[finish()]]
    backend = ScriptedBackend(scripts(a=plays))
    async with engine_on(backend, policy=Policy(max_attempts=2, backoff_initial=0.1)) as engine:
        done = await engine.generate(request())
    assert done.state is RolloutState.COMPLETED
    assert done.attempt == 9


async def test_preempts_never_exhaust() -> None:
    """They are not the request's fault, however often they come."""
    plays = [[PREEMPTED]] * 30 + [[tokens(1), finish()]]
    async with engine_on(ScriptedBackend(scripts(a=plays)), policy=Policy(max_attempts=1)) as engine:
        done = await engine.generate(request())
    assert done.state is RolloutState.COMPLETED
    assert done.attempt == 31


async def test_connections_that_break_cost_attempts_only_when_all_of_them_do() -> None:
    """A dead worker is not the request's fault; four times max_attempts in a row may be."""
    plays = [[lost()]] * 7 + [[tokens(1), lost()]] + [[lost()]] * 7 + [[tokens(1), finish()]]
    backend = ScriptedBackend(scripts(lucky=plays, poison=[[lost()]]))
    async with engine_on(backend, policy=Policy(max_attempts=2)) as engine:
        assert (await engine.generate(request("lucky"))).state is RolloutState.COMPLETED
        done = await engine.generate(request("poison"))
        assert (done.state, done.reason, done.attempt) == (RolloutState.FAILED, Reason.ATTEMPTS, 8)
        assert done.detail == "disconnected"


async def test_a_rollout_without_attempts_left_says_why_the_last_one_ended() -> None:
    """The reason counts attempts; what went wrong with them is in the detail."""
    cut = StreamEnd(EndKind.LOST, Reason.TRUNCATED, "the body ended early")
    async with engine_on(ScriptedBackend(lambda _: [cut]), policy=Policy(max_attempts=2)) as engine:
        done = await engine.generate(request())
    assert (done.reason, done.detail) == (Reason.ATTEMPTS, "truncated: the body ended early")


async def test_a_refusal_fails_at_once() -> None:
    """HTTP 4xx and the like are final, in the server's words."""
    refused = StreamEnd(EndKind.REJECTED, Reason.REFUSED, "too long", status=400)
    lines = Lines()
    async with engine_on(ScriptedBackend(lambda _: [refused]), lines) as engine:
        done = await engine.generate(request())
        assert engine.ledger().rollouts["failed"] == 1
    assert (done.state, done.reason, done.detail) == (RolloutState.FAILED, Reason.REFUSED, "too long")
    assert lines.walk("a") == ["dispatch streaming", "reject failed"]


# -- outages ---------------------------------------------------------------------------------------------------------


class Flaky(ScriptedBackend):
    """Turns requests away while `out` is set, and counts how many tried."""

    def __init__(self, reason: Reason = Reason.UNREACHABLE) -> None:
        super().__init__(self._play)
        self.out = True
        self.reason = reason
        self.tried = 0

    def _play(self, _call):
        self.tried += 1
        return [lost(self.reason)] if self.out else [[], tokens(1), Pause(1), finish()]


@pytest.mark.parametrize("reason", [Reason.UNREACHABLE, Reason.RATE_LIMITED, Reason.UNAVAILABLE])
async def test_an_outage_costs_no_attempts_and_probes_one_at_a_time(reason: Reason) -> None:
    """While requests are turned away one probe at a time goes out; the first that is accepted ends it."""
    lines, backend = Lines(), Flaky(reason)
    async with engine_on(backend, lines, policy=Policy(max_attempts=1)) as engine:
        handles = [engine.submit(request(f"r{number}")) for number in range(5)]
        await anyio.sleep(20)
        assert all(handle.state is RolloutState.PENDING for handle in handles)
        assert 0 < engine.stats().outage_s <= 20
        first, probes = 5, backend.tried - 5
        assert 4 <= probes <= 12, f"{first} before the outage was known, then one at a time, ever more seldom"
        backend.out = False
        await engine.drain()
        assert all(handle.state is RolloutState.COMPLETED for handle in handles)
        assert engine.stats().outage_s == 0.0
    outages = lines.of(BackendOutage)
    assert {line["reason"] for line in outages} == {str(reason)}
    assert [line["failures"] for line in outages] == list(range(1, len(outages) + 1))
    assert len(lines.of(BackendRecovered)) == 1


async def test_after_an_accepted_probe_the_others_follow_at_once() -> None:
    """The probe is accepted by its first, empty batch; nobody waits for it to finish."""
    backend = Flaky()
    async with engine_on(backend) as engine:
        handles = [engine.submit(request(f"r{number}")) for number in range(3)]
        await anyio.sleep(1)
        backend.out = False
        await until(lambda: any(handle.state is RolloutState.PARTIAL for handle in handles))
        await anyio.sleep(0.01)
        assert all(handle.in_flight for handle in (h.rollout for h in handles))


async def test_after_unreachable_timeout_rollouts_rest_resumable() -> None:
    """Exactly then the last probe is made; its failure lets everything rest, reason unreachable."""
    lines, backend = Lines(), Flaky()
    async with engine_on(backend, lines, unreachable_timeout=60.0) as engine:
        handles = [engine.submit(request(f"r{number}")) for number in range(3)]
        began = anyio.current_time()
        snapshots = [await handle.wait() for handle in handles]
        assert anyio.current_time() - began == pytest.approx(60.0, abs=0.01)
        assert {(s.state, s.reason) for s in snapshots} == {(RolloutState.ABORTED, Reason.UNREACHABLE)}
        assert engine.ledger().rollouts["resumable"] == 3
        assert engine.ledger().balanced
        backend.out = False
        again = [engine.submit(snapshot) for snapshot in snapshots]
        assert [(await handle.wait()).state for handle in again] == [RolloutState.COMPLETED] * 3
    assert {line["reason"] for line in lines.of(RolloutRest, state="aborted")} == {"unreachable"}


async def test_a_server_that_is_full_for_too_long_is_unreachable_too() -> None:
    """What rests says so, whatever the last refusal was."""
    backend = Flaky(Reason.UNAVAILABLE)
    async with engine_on(backend, unreachable_timeout=5.0) as engine:
        handles = [engine.submit(request(name)) for name in "ab"]
        await engine.drain()
        assert {handle.snapshot().reason for handle in handles} == {Reason.UNREACHABLE}


async def test_an_engine_that_gave_up_tries_again_for_what_comes_later() -> None:
    """A later submit is a probe: served when the server is back, at rest when it is not."""
    backend = Flaky()
    async with engine_on(backend, unreachable_timeout=5.0) as engine:
        assert (await engine.generate(request("a"))).reason is Reason.UNREACHABLE
        await anyio.sleep(100)
        assert (await engine.generate(request("b"))).reason is Reason.UNREACHABLE
        backend.out = False
        assert (await engine.generate(request("c"))).state is RolloutState.COMPLETED


async def test_a_stream_lost_late_in_an_outage_rests_too() -> None:
    """What was accepted before, and is turned away after the outage has lasted too long, rests."""
    backend = ScriptedBackend(
        scripts(old=[[[], tokens(1), Pause(50), lost(Reason.UNREACHABLE)]], new=[[lost(Reason.UNREACHABLE)]])
    )
    async with engine_on(backend, unreachable_timeout=10.0) as engine:
        old = engine.submit(request("old"))
        await until(lambda: old.state is RolloutState.PARTIAL)
        assert (await engine.generate(request("new"))).reason is Reason.UNREACHABLE
        kept = await old.wait()
        assert (kept.state, kept.reason, list(kept.tokens)) == (RolloutState.ABORTED, Reason.UNREACHABLE, [1])


async def test_the_engine_sleeps_while_nothing_can_be_dispatched() -> None:
    """A back-off that ends while the engine is full or the gate is closed makes nobody spin."""
    plays = {"a": [[tokens(1), lost()], [tokens(2), finish()]], "b": [[tokens(1), Pause(100), finish()]]}
    async with engine_on(ScriptedBackend(scripts(**plays)), max_in_flight=1) as engine:
        a = engine.submit(request("a"))
        b = engine.submit(request("b"))
        await until(lambda: b.state is RolloutState.PARTIAL)
        assert a.state is RolloutState.PENDING
        await anyio.sleep(50)
        assert engine.core.next_dispatch() is None
        assert engine.stats().backing_off + engine.stats().ready == 1
        await a.wait()
        assert b.at_rest


async def test_a_probe_that_is_aborted_lets_another_one_through() -> None:
    """A probe that hangs and is given up must not block the queue."""
    backend = ScriptedBackend(
        scripts(a=[[lost(Reason.UNREACHABLE)], [Hang(None)]], b=[[tokens(1), finish()]])
    )
    backend.deaf = True
    async with engine_on(backend) as engine:
        probe = engine.submit(request("a"))
        await until(lambda: len(backend.calls) == 2)
        other = engine.submit(request("b"))
        await anyio.sleep(30)
        assert other.state is RolloutState.PENDING
        await probe.abort(timeout=1.0)
        assert (await other.wait()).state is RolloutState.COMPLETED


# -- text prompts ----------------------------------------------------------------------------------------------------


async def test_tokenising_that_finds_no_worker_is_an_outage() -> None:
    """One probe at a time, and rest after too long: never a busy loop."""

    class Silent(Flaky):
        async def tokenize(self, text):
            self.tried += 1
            await anyio.lowlevel.checkpoint()
            if self.out:
                raise BackendUnreachable("no worker can tokenise")
            return [9]

    lines, backend = Lines(), Silent()
    async with engine_on(backend, lines, unreachable_timeout=30.0) as engine:
        handles = [engine.submit(request(f"r{number}", text="hi")) for number in range(3)]
        await anyio.sleep(10)
        assert backend.tried <= 3 + 8
        await engine.drain()
        assert {handle.snapshot().reason for handle in handles} == {Reason.UNREACHABLE}
        backend.out = False
        done = await engine.submit(handles[0].snapshot()).wait()
        assert done.prompt_ids == (9,)
        assert done.state is RolloutState.COMPLETED
    assert "no worker can tokenise" in lines.of(BackendOutage)[0]["detail"]


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ConfigurationError("the tokenizer returned words"), "the tokenizer returned words"),
        (ZeroDivisionError("hush"), "tokenising raised ZeroDivisionError"),
        (None, "the prompt has no tokens"),
    ],
)
async def test_a_prompt_without_ids_fails(error: Exception | None, detail: str) -> None:
    """What can never be tokenised is rejected, and takes nothing else with it."""

    class Bad(ScriptedBackend):
        async def tokenize(self, text):
            await anyio.sleep(1)
            if error is not None:
                raise error
            return []

    async with engine_on(Bad(simple(1))) as engine:
        bad, gone = engine.submit(request("bad", text="x")), engine.submit(request("gone", text="x"))
        await anyio.sleep(0.5)
        engine.discard(gone)
        done = await bad.wait()
        assert (done.state, done.reason, done.detail) == (RolloutState.FAILED, Reason.MALFORMED, detail)
        assert (await engine.generate(request("good"))).state is RolloutState.COMPLETED


async def test_an_abort_while_tokenising_rests_at_once() -> None:
    """Nothing is in flight, so there is nothing to wait for; the ids are kept for later."""

    class Slow(ScriptedBackend):
        async def tokenize(self, text):
            await anyio.sleep(5)
            return [3]

    backend = Slow(simple(1))
    async with engine_on(backend) as engine:
        handle = engine.submit(request(text="x"))
        await until(lambda: engine.core.preparing)
        report = await handle.abort()
        assert report.outcomes == {"a": Outcome.NEVER_SENT}
        await anyio.sleep(10)
        assert backend.calls == []
        assert handle.snapshot().prompt_ids == (3,)


async def test_an_unreachable_tokeniser_after_an_abort_changes_nothing() -> None:
    """The rollout rests already; the outage is noted all the same."""

    class Slow(ScriptedBackend):
        async def tokenize(self, text):
            await anyio.sleep(5)
            raise BackendUnreachable("gone")

    lines = Lines()
    async with engine_on(Slow(simple(1)), lines) as engine:
        handle = engine.submit(request(text="x"))
        await until(lambda: engine.core.preparing)
        await handle.abort()
        await anyio.sleep(10)
        assert handle.state is RolloutState.ABORTED
    assert len(lines.of(BackendOutage)) == 1


# -- stalls ----------------------------------------------------------------------------------------------------------


async def test_a_stream_without_a_first_token_is_aborted_and_tried_again() -> None:
    """first_token_timeout raises abort with reason stalled; then it counts as an attempt."""
    lines = Lines()
    policy = Policy(first_token_timeout=10, idle_timeout=5, max_attempts=2, backoff_initial=0.1)
    backend = ScriptedBackend(scripts(a=[[[], Hang()], [tokens(1), finish()]]))
    async with engine_on(backend, lines, policy=policy) as engine:
        done = await engine.generate(request())
    assert done.state is RolloutState.COMPLETED
    assert lines.walk("a")[:4] == [
        "dispatch streaming",
        "abort aborting",
        "confirm aborted",
        "restore pending",
    ]
    abort = lines.of(RolloutTransition, trigger="abort")[0]
    assert abort["reason"] == "stalled"
    assert 10 <= abort["dwell_s"] <= 11.01


async def test_a_silent_stream_with_tokens_is_aborted_after_idle_timeout() -> None:
    """Tokens so far are kept, and the next attempt goes on behind them."""
    lines = Lines()
    policy = Policy(first_token_timeout=50, idle_timeout=5, backoff_initial=0.1)
    backend = ScriptedBackend(scripts(a=[[tokens(1), Hang()], [tokens(2), finish()]]))
    async with engine_on(backend, lines, policy=policy) as engine:
        done = await engine.generate(request())
    assert list(done.tokens) == [1, 2]
    assert 5 <= lines.of(RolloutTransition, trigger="abort")[0]["dwell_s"] <= 6.01


async def test_stalls_without_a_token_exhaust_in_the_end() -> None:
    """A request that never yields anything fails after max_attempts."""
    policy = Policy(first_token_timeout=2, max_attempts=2, backoff_initial=0.1)
    async with engine_on(ScriptedBackend(lambda _: [Hang()]), policy=policy) as engine:
        done = await engine.generate(request())
    assert (done.state, done.reason) == (RolloutState.FAILED, Reason.ATTEMPTS)


async def test_stall_clocks_can_be_off_and_stand_still_while_the_gate_is_not_open() -> None:
    """No time-out during a weight update, and the time starts anew afterwards."""
    lines = Lines()
    policy = Policy(first_token_timeout=None, idle_timeout=10)
    backend = ScriptedBackend(lambda _: [[], Pause(30), tokens(1), Pause(100), tokens(2), finish()])
    async with engine_on(backend, lines, policy=policy) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        async with engine.weight_update("2", "in_place"):
            await anyio.sleep(95)
        assert (await handle.wait()).state is RolloutState.COMPLETED
    assert lines.of(RolloutTransition, trigger="abort") == []


# -- the caller's intent ---------------------------------------------------------------------------------------------


async def test_an_abort_while_backing_off_joins_and_wins() -> None:
    """No retry follows."""
    backend = ScriptedBackend(lambda _: [lost(Reason.TRUNCATED)])
    async with engine_on(backend, policy=Policy(backoff_initial=30.0)) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PENDING and handle.rollout.attempt == 1)
        report = await handle.abort()
        await anyio.sleep(100)
        assert report.outcomes["a"] is Outcome.NEVER_SENT
        assert handle.state is RolloutState.ABORTED
        assert len(backend.calls) == 1


async def test_a_callers_abort_during_a_stall_abort_wins() -> None:
    """The engine was going to retry; the caller wants it at rest."""
    backend = ScriptedBackend(lambda _: [Hang(None)])
    backend.deaf = True
    async with engine_on(backend, policy=Policy(first_token_timeout=2), abort_timeout=20.0) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.ABORTING)
        report = await handle.abort(reason="over-sampled", timeout=3.0)
        assert report.elapsed_s == pytest.approx(3.0, abs=0.01)
        assert handle.snapshot().reason is Reason.OVER_SAMPLED
        await anyio.sleep(100)
        assert len(backend.calls) == 1


async def test_an_outcome_of_an_earlier_attempt_is_not_told_again() -> None:
    """Confirmed once, restored, then aborted while pending: never sent."""
    backend = ScriptedBackend(lambda _: [Hang()])
    policy = Policy(first_token_timeout=2, backoff_initial=30)
    async with engine_on(backend, policy=policy) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PENDING and handle.rollout.attempt == 1)
        assert (await handle.abort()).outcomes["a"] is Outcome.NEVER_SENT


async def test_the_first_token_of_an_attempt_is_dated_also_while_aborting() -> None:
    """Tokens that come after the abort was asked for have the time they came."""
    backend = ScriptedBackend(lambda _: [[], Pause(5), tokens(1), Hang()])
    async with engine_on(backend) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.STREAMING)
        backend.deaf = True
        report = await handle.abort(timeout=10.0)
        attempt = handle.snapshot().attempts[0]
        assert report.kept == ("a",)
        assert attempt.first_token_at is not None
        assert attempt.first_token_at >= attempt.dispatched_at > 0


async def test_restored_partials_go_before_fresh_requests() -> None:
    """What was begun is finished first."""
    backend = ScriptedBackend(simple(1))
    async with engine_on(backend, max_in_flight=1) as engine:
        handles = [
            engine.submit(request("fresh")),
            engine.submit(Snapshot.from_prefix(request("begun"), [1])),
        ]
        await engine.drain()
        assert all(handle.at_rest for handle in handles)
    assert [call.rollout_id for call in backend.calls] == ["begun", "fresh"]


async def test_errors_of_the_library_share_a_root() -> None:
    """One except clause catches them all."""
    assert issubclass(SnapshotError, Exception)
    with pytest.raises(ConfigurationError):
        LifecycleEngine(ScriptedBackend(simple()), nonsense=1)
