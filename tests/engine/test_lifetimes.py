"""Submit, wait, generate, watch: the life of a rollout against a scripted server."""

from __future__ import annotations

from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest

from lifecycle.engine import LifecycleEngine
from lifecycle.errors import ConfigurationError, DuplicateRollout, EngineClosed
from lifecycle.events import Anomaly, ChannelData, EndKind, StreamEnd, TokenSlice, VersionSpan, token_slice
from lifecycle.log.records import EngineStarted, EngineStopped, RolloutDisposition, RolloutRest, StreamAnomaly
from lifecycle.policy import Policy
from lifecycle.snapshot import Snapshot
from lifecycle.states import Disposition, FinishReason, Outcome, Reason, RolloutState
from lifecycle.testing.backend import Hang, Pause, ScriptedBackend, finish, lost, tokens
from tests.support.driving import Lines, engine_on, request, scripts, simple, until

pytestmark = pytest.mark.anyio


async def test_a_rollout_goes_from_pending_to_completed() -> None:
    """A plain request is dispatched once, observed, finished, delivered and retired."""
    lines, backend = Lines(), ScriptedBackend(lambda _: [tokens(5, 6), tokens(7), finish()])
    async with engine_on(backend, lines) as engine:
        handle = engine.submit(request())
        assert handle.state is RolloutState.PENDING
        assert "a" in repr(handle)
        snapshot = await handle.wait()
        assert snapshot.state is RolloutState.COMPLETED
        assert list(snapshot.tokens) == [5, 6, 7]
        assert list(snapshot.logprobs) == [-0.5] * 3
        assert snapshot.finish_reason is FinishReason.STOP
        assert snapshot.spans == (VersionSpan("default", 0, 3, "label"),)
        assert engine.ledger().rollouts["delivered"] == 1
        assert engine.ledger().balanced
        assert engine.places() == {}
        with pytest.raises(KeyError):
            engine.handle("a")
    assert lines.walk("a") == ["dispatch streaming", "observe partial", "finish completed"]
    assert lines.of(RolloutDisposition)[0]["disposition"] == "delivered"
    assert lines.all[0][0] == "engine.started"
    assert lines.all[-1][0] == "engine.stopped"
    call = backend.calls[0]
    assert call.input_ids == [1, 2, 3]
    assert call.sampling_params == {"max_new_tokens": 100}
    assert len(call.rid) == 32


async def test_every_line_of_a_rollout_is_numbered_without_a_gap() -> None:
    """`seq` counts transitions, rest and disposition from 1."""
    lines = Lines()
    async with engine_on(ScriptedBackend(simple(1)), lines) as engine:
        await engine.generate(request())
    numbers = [
        fields["seq"] for _, fields in lines.all if fields.get("rollout_id") == "a" and "seq" in fields
    ]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) == 5


async def test_generate_returns_the_snapshot_at_rest() -> None:
    """`generate` is submit and wait."""
    async with engine_on(ScriptedBackend(simple(4))) as engine:
        assert list((await engine.generate(request())).tokens) == [4]


async def test_cancelling_a_wait_abandons_the_wait_only() -> None:
    """The rollout goes on, and can be waited for again."""
    async with engine_on(ScriptedBackend(lambda _: [tokens(1), Pause(10), finish()])) as engine:
        handle = engine.submit(request())
        with anyio.move_on_after(5) as scope:
            await handle.wait()
        assert scope.cancelled_caught
        assert handle.state is RolloutState.PARTIAL
        assert (await handle.wait()).state is RolloutState.COMPLETED


async def test_cancelling_generate_aborts_and_keeps_the_prefix() -> None:
    """A tied rollout is told to end, keeps its tokens, and the cancellation goes on."""
    lines, backend = Lines(), ScriptedBackend(lambda _: [tokens(1, 2), Hang()])
    async with engine_on(backend, lines) as engine:
        with anyio.move_on_after(5) as scope:
            await engine.generate(request())
        assert scope.cancelled_caught
        kept = engine.handle("a").snapshot()
        assert kept.state is RolloutState.ABORTED
        assert kept.reason is Reason.CANCELLED
        assert kept.outcome is Outcome.CONFIRMED
        assert list(kept.tokens) == [1, 2]
        assert len(backend.aborted) == 1
    assert lines.walk("a")[-2:] == ["abort aborting", "confirm aborted"]


async def test_two_waiters_hear_the_same_and_one_delivery_is_logged() -> None:
    """Waiting twice at once delivers once."""
    lines = Lines()
    async with engine_on(ScriptedBackend(lambda _: [tokens(1), Pause(1), finish()]), lines) as engine:
        handle = engine.submit(request())
        heard = []

        async def wait() -> None:
            heard.append(await handle.wait())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(wait)
        assert [list(snapshot.tokens) for snapshot in heard] == [[1], [1]]
        assert (await handle.wait()).disposition is Disposition.DELIVERED
    assert len(lines.of(RolloutDisposition)) == 1


async def test_updates_show_growth_and_end_at_rest() -> None:
    """News that arrive while nobody looks come as one; the last snapshot is at rest."""
    script = [tokens(1), tokens(2), Pause(1), tokens(3), Pause(1), finish()]
    async with engine_on(ScriptedBackend(lambda _: script)) as engine:
        handle = engine.submit(request())
        seen = [snapshot async for snapshot in handle.updates()]
        lengths = [len(snapshot.tokens) for snapshot in seen]
        assert lengths == sorted(lengths)
        assert lengths[-2:] == [3, 3]
        assert 2 in lengths
        assert seen[-1].state is RolloutState.COMPLETED
        assert not any(snapshot.final for snapshot in seen[:-1])


async def test_a_budget_of_nothing_is_finished_without_a_request() -> None:
    """max_new_tokens=0 completes from pending, reason length."""
    lines, backend = Lines(), ScriptedBackend(simple(1))
    async with engine_on(backend, lines) as engine:
        snapshot = await engine.generate(request(max_new_tokens=0))
    assert snapshot.finish_reason is FinishReason.LENGTH
    assert lines.walk("a") == ["finish completed"]
    assert backend.calls == []


async def test_a_resumed_snapshot_goes_on_behind_its_tokens() -> None:
    """Prompt and kept tokens are sent, with what is left of the budget."""
    backend = ScriptedBackend(lambda _: [token_slice([(-1.0, 8)], "2"), finish(FinishReason.LENGTH)])
    async with engine_on(backend) as engine:
        prefix = Snapshot.from_prefix(request(max_new_tokens=3), [6, 7], [-0.1, None], "1")
        done = await engine.generate(prefix)
        assert list(done.tokens) == [6, 7, 8]
        assert done.spans == (VersionSpan("1", 0, 2, "given"), VersionSpan("2", 2, 3, "label"))
        ledger = engine.ledger()
        assert (ledger.brought, ledger.observed, ledger.saved_tokens) == (2, 1, 2)
        assert ledger.balanced
    assert backend.calls[0].input_ids == [1, 2, 3, 6, 7]
    assert backend.calls[0].sampling_params["max_new_tokens"] == 1


async def test_a_full_prefix_is_finished_without_a_request() -> None:
    """A snapshot whose budget is used up completes at once."""
    backend = ScriptedBackend(simple(1))
    async with engine_on(backend) as engine:
        done = await engine.generate(Snapshot.from_prefix(request(max_new_tokens=2), [6, 7]))
        assert done.state is RolloutState.COMPLETED
    assert backend.calls == []


async def test_a_prefix_that_ends_in_a_stop_token_is_finished_without_a_request() -> None:
    """A resume would generate beyond the end."""
    backend = ScriptedBackend(simple(1))
    async with engine_on(backend, policy=Policy(eos_token_ids=frozenset({7}))) as engine:
        done = await engine.generate(Snapshot.from_prefix(request(), [6, 7]))
        assert (done.state, done.finish_reason, done.matched) == (
            RolloutState.COMPLETED,
            FinishReason.STOP,
            7,
        )
    assert backend.calls == []


async def test_tokens_without_a_label_are_of_unknown_version() -> None:
    """Unknown stays unknown."""
    async with engine_on(ScriptedBackend(lambda _: [tokens(1, version=None), finish()])) as engine:
        assert (await engine.generate(request())).spans == ()


async def test_updates_pass_over_news_that_bring_no_token() -> None:
    """An attempt lost before its first token is no growth."""
    backend = ScriptedBackend(scripts(a=[[Pause(1), lost()], [Pause(1), tokens(1), Pause(1), finish()]]))
    async with engine_on(backend) as engine:
        seen = [len(snapshot.tokens) async for snapshot in engine.submit(request()).updates()]
    assert seen == [0, 1, 1]


async def test_a_pending_snapshot_starts_from_the_prompt() -> None:
    """An empty prefix is an ordinary beginning."""
    async with engine_on(ScriptedBackend(simple(1))) as engine:
        assert list((await engine.generate(Snapshot.from_prefix(request()))).tokens) == [1]


async def test_a_snapshot_taken_in_flight_comes_back_as_aborted() -> None:
    """Its request belongs to nobody: reason crash, then restored."""
    lines = Lines()
    async with engine_on(ScriptedBackend(lambda _: [tokens(1), Hang()])) as first:
        handle = first.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        flying = handle.snapshot()
    async with engine_on(ScriptedBackend(simple(2)), lines) as second:
        done = await second.generate(flying)
    assert list(done.tokens) == [1, 2]
    assert done.attempt == 2
    assert lines.walk("a")[0] == "restore pending"
    assert [fields["reason"] for event, fields in lines.all if event == "rollout.restored"] == ["crash"]


async def test_a_final_snapshot_is_at_rest_at_once() -> None:
    """Nothing is sent for it, and it can be delivered again."""
    backend = ScriptedBackend(simple(1))
    async with engine_on(backend) as engine:
        done = await engine.generate(request())
        handle = engine.submit(done)
        assert handle.at_rest
        again = await handle.wait()
        assert list(again.tokens) == [1]
        assert engine.places() == {}
        assert engine.ledger().balanced
    assert len(backend.calls) == 1


async def test_an_id_that_is_alive_is_refused() -> None:
    """DuplicateRollout names the id and its state; after delivery the id is free."""
    async with engine_on(ScriptedBackend(lambda _: [Hang()])) as engine:
        handle = engine.submit(request())
        with pytest.raises(DuplicateRollout, match="'a' is already known and pending"):
            engine.submit(request())
        with pytest.raises(DuplicateRollout):
            engine.submit(handle.snapshot())
        await handle.abort()
        with pytest.raises(DuplicateRollout, match="aborted"):
            engine.submit(request())
        with pytest.raises(DuplicateRollout):
            engine.submit(Snapshot.from_prefix(request(), [1]))


async def test_an_aborted_rollout_goes_on_with_its_own_snapshot() -> None:
    """Submitting what rests here resumes it under the same handle."""
    backend = ScriptedBackend(scripts(a=[[tokens(1), Hang()], [tokens(2), finish()]]))
    async with engine_on(backend) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        await handle.abort()
        kept = await handle.wait()
        assert kept.state is RolloutState.ABORTED
        again = engine.submit(kept)
        assert again.rollout is handle.rollout
        assert list((await again.wait()).tokens) == [1, 2]


async def test_the_engine_is_used_inside_its_block_only() -> None:
    """Before and after, and twice, EngineClosed says so."""
    engine = engine_on(ScriptedBackend(simple(1)))
    with pytest.raises(EngineClosed, match="inside"):
        engine.submit(request())
    async with engine:
        with pytest.raises(EngineClosed, match="once"):
            await engine.__aenter__()
        await engine.close()
        with pytest.raises(EngineClosed):
            engine.submit(request())
        with pytest.raises(EngineClosed):
            await engine.collect([])
        with pytest.raises(EngineClosed):
            engine.weight_update("2")
        with pytest.raises(EngineClosed):
            engine.resume()
        with pytest.raises(EngineClosed):
            await engine.restore()
    with pytest.raises(EngineClosed):
        await engine.__aenter__()


async def test_wrong_settings_are_refused_by_name() -> None:
    """A setting nobody knows lists those that exist; a bad number is named."""
    with pytest.raises(ConfigurationError, match="max_in_flight"):
        LifecycleEngine(ScriptedBackend(simple()), max_inflight=3)
    with pytest.raises(ConfigurationError, match="max_in_flight must be a whole number from 1, not 0"):
        LifecycleEngine(ScriptedBackend(simple()), max_in_flight=0)
    with pytest.raises(ConfigurationError, match="abort_timeout must be a number above 0, not -1"):
        LifecycleEngine(ScriptedBackend(simple()), abort_timeout=-1)


async def test_no_more_than_max_in_flight_are_sent_at_once() -> None:
    """The others wait in the queue, and all are served."""
    most = 0

    backend = ScriptedBackend(lambda _: [tokens(1), Pause(1), finish()])
    async with engine_on(backend, max_in_flight=3) as engine:
        handles = [engine.submit(request(f"r{number}")) for number in range(10)]
        while not all(handle.at_rest for handle in handles):
            most = max(most, len(backend.live))
            await anyio.sleep(0.1)
        stats = engine.stats()
        assert stats.max_in_flight == 3
        assert stats.attempts == 10
        assert stats.states == {"completed": 10}
        assert stats.as_dict()["observed_tokens"] == 10
    assert most == 3


async def test_a_text_prompt_is_tokenised_once() -> None:
    """The ids are kept over attempts, so that a resume can send prompt and tokens."""
    asked = []

    def ids(text: str) -> list[int]:
        asked.append(text)
        return [10, 11]

    backend = ScriptedBackend(scripts(a=[[tokens(1), lost()], [tokens(2), finish()]]))
    backend.tokens_of_text = ids
    async with engine_on(backend) as engine:
        done = await engine.generate(request(text="hi"))
    assert asked == ["hi"]
    assert done.prompt_ids == (10, 11)
    assert [call.input_ids for call in backend.calls] == [[10, 11], [10, 11, 1]]


async def test_a_stream_that_cannot_be_true_rejects_its_rollout() -> None:
    """More tokens than the budget: failed, reason malformed, and the server is told to stop."""
    lines, backend = Lines(), ScriptedBackend(lambda _: [[tokens(1), tokens(2, 3, 4), tokens(5)], finish()])
    async with engine_on(backend, lines) as engine:
        done = await engine.generate(request(max_new_tokens=3))
        await until(lambda: backend.aborted)
    assert done.state is RolloutState.FAILED
    assert done.reason is Reason.MALFORMED
    assert done.detail == "3 more tokens where the budget leaves 2"
    assert list(done.tokens) == [1]


async def test_a_slice_with_unequal_lengths_rejects() -> None:
    """Tokens without logprobs, or none at all, are no slice."""
    for piece in (TokenSlice([1, 2], [-0.5]), TokenSlice([], [])):
        async with engine_on(ScriptedBackend(lambda _, piece=piece: [piece])) as engine:
            done = await engine.generate(request())
            assert done.reason is Reason.MALFORMED
            assert not done.tokens


async def test_a_backend_that_raises_fails_that_rollout_only() -> None:
    """The bug of an adapter is named by its type, and the other rollouts go on."""

    def script(call):
        if call.rollout_id == "bad":
            raise ZeroDivisionError("secret words")
        return [tokens(1), Pause(1), finish()]

    lines = Lines()
    async with engine_on(ScriptedBackend(script), lines) as engine:
        good = engine.submit(request("good"))
        bad = await engine.generate(request("bad"))
        assert bad.state is RolloutState.FAILED
        assert bad.detail == "the backend raised ZeroDivisionError"
        assert (await good.wait()).state is RolloutState.COMPLETED
    assert lines.of(StreamAnomaly)[0]["kind"] == "backend_raised"
    assert "secret words" not in str(lines.all)


async def test_an_adapter_that_raises_before_or_after_its_stream_harms_nobody() -> None:
    """A plain method that raises at once fails the rollout; trouble while closing is only a line."""

    class Early(ScriptedBackend):
        def stream(self, call):
            raise ZeroDivisionError

    class Late(ScriptedBackend):
        async def stream(self, call):
            try:
                yield [tokens(1), finish()]
            finally:
                raise ZeroDivisionError

    class Plain(ScriptedBackend):
        def stream(self, call):
            return self

        async def __anext__(self):
            await anyio.lowlevel.checkpoint()
            return [tokens(1), finish()]

    for kind, state in ((Early, "failed"), (Late, "completed"), (Plain, "completed")):
        lines = Lines()
        async with engine_on(kind(simple(1)), lines) as engine:
            assert (await engine.generate(request())).state == state
        assert len(lines.of(StreamAnomaly, kind="backend_raised")) == (kind is not Plain)


async def test_a_stream_without_an_end_is_lost() -> None:
    """The iterator ends and no StreamEnd came: truncated, and tried again."""

    class Mute(ScriptedBackend):
        async def stream(self, call):
            async for batch in super().stream(call):
                yield [event for event in batch if not isinstance(event, StreamEnd)]

    lines = Lines()
    async with engine_on(Mute(simple(1)), lines) as engine:
        handle = engine.submit(request(max_new_tokens=2))
        done = await handle.wait()
    assert done.state is RolloutState.COMPLETED
    assert lines.walk("a")[:4] == ["dispatch streaming", "observe partial", "lose aborted", "restore pending"]
    assert lines.walk("a")[-1] == "finish completed"


async def test_channels_and_anomalies_of_a_stream_are_kept_and_logged() -> None:
    """An opaque per-token array travels in the snapshot; an anomaly changes nothing."""
    script = [
        [Anomaly("odd", "words")],
        tokens(1),
        ChannelData("experts", b"\x01", 0, complete=True),
        ChannelData("experts", b"\x02", 1, complete=False),
        finish(),
    ]
    lines = Lines()
    async with engine_on(ScriptedBackend(lambda _: script), lines) as engine:
        done = await engine.generate(request())
    assert done.channels["experts"].pieces == [(0, b"\x01"), (1, b"\x02")]
    assert not done.channels["experts"].complete
    assert lines.of(StreamAnomaly)[0]["detail"] == "words"


async def test_late_events_of_an_old_attempt_are_logged_and_ignored() -> None:
    """What a closed attempt still says changes nothing."""
    lines, backend = Lines(), ScriptedBackend(lambda _: [tokens(1), Hang()])
    async with engine_on(backend, lines) as engine:
        handle = engine.submit(request())
        await until(lambda: handle.state is RolloutState.PARTIAL)
        flight = next(iter(engine.core.flights.values()))
        await handle.abort()
        assert engine.core.absorb(flight, [tokens(2, 3), finish()])
        assert list(handle.snapshot().tokens) == [1]
    assert lines.of(StreamAnomaly)[0]["detail"] == "2 tokens in 2 events after the attempt was over"


async def test_spans_that_do_not_cover_keep_the_labels() -> None:
    """Terminal versions replace labels only when they cover this attempt's tokens exactly."""
    bad = StreamEnd(
        EndKind.FINISHED, Reason.STOP, finish_reason=FinishReason.STOP, spans=(VersionSpan("9", 0, 1),)
    )
    good = StreamEnd(
        EndKind.FINISHED,
        Reason.STOP,
        finish_reason=FinishReason.STOP,
        spans=(VersionSpan("8", 0, 1), VersionSpan("9", 1, 2)),
        meta={"worker": "w1"},
    )
    lines = Lines()
    async with engine_on(
        ScriptedBackend(scripts(a=[[tokens(1, 2), bad]], b=[[tokens(1, 2), good]])), lines
    ) as engine:
        kept = await engine.generate(request("a"))
        replaced = await engine.generate(request("b"))
    assert kept.spans == (VersionSpan("default", 0, 2, "label"),)
    assert replaced.spans == (VersionSpan("8", 0, 1), VersionSpan("9", 1, 2))
    assert replaced.attempts[0].worker == "w1"
    assert [line["kind"] for line in lines.of(StreamAnomaly)] == ["versions_do_not_fit"]


async def test_two_engines_in_one_process_do_not_meet() -> None:
    """The same id in both, each with its own books."""
    one, two = ScriptedBackend(simple(1)), ScriptedBackend(simple(2))
    async with engine_on(one) as first, engine_on(two) as second:
        handles = first.submit(request()), second.submit(request())
        assert [list((await handle.wait()).tokens) for handle in handles] == [[1], [2]]
        assert first.process_id != second.process_id
        assert first.run_id != second.run_id


async def test_the_step_is_on_every_line() -> None:
    """What the caller sets as training step is written along."""
    lines = Lines()
    async with engine_on(ScriptedBackend(simple(1)), lines, run_id="run") as engine:
        engine.step = 4
        await engine.generate(request())
        assert engine.step == 4
        assert engine.run_id == "run"
    assert lines.of(EngineStarted)[0]["step"] is None
    assert {line["step"] for line in lines.of(RolloutRest)} == {4}
    assert {line["run_id"] for line in lines.of(EngineStopped)} == {"run"}


async def test_discard_gives_up_what_is_pending_or_rests() -> None:
    """With its reason, and too late changes nothing."""
    lines = Lines()
    async with engine_on(ScriptedBackend(lambda _: [tokens(1), Hang()]), lines, max_in_flight=1) as engine:
        flying, waiting = engine.submit(request("a")), engine.submit(request("b"))
        await until(lambda: flying.state is RolloutState.PARTIAL)
        engine.discard(waiting, reason="not needed")
        assert waiting.state is RolloutState.DISCARDED
        assert waiting.snapshot().detail == "not needed"
        await flying.abort()
        engine.discard("a", reason=Reason.STALE)
        assert (await flying.wait()).reason is Reason.STALE
        engine.discard(flying)
        assert engine.places() == {}
        ledger = engine.ledger()
        assert ledger.rollouts["discarded"] == 2
        assert ledger.wasted == {"stale": 1}
        assert ledger.balanced
        with pytest.raises(ConfigurationError, match="holds no rollout 'nobody'"):
            engine.discard("nobody")
    assert lines.walk("a")[-2:] == ["discard discarded", "discard discarded"]


async def test_drain_waits_for_everything() -> None:
    """Also for what is submitted meanwhile."""
    async with engine_on(ScriptedBackend(lambda _: [tokens(1), Pause(2), finish()])) as engine:
        first = engine.submit(request("a"))

        async def later() -> None:
            await anyio.sleep(1)
            engine.submit(request("b"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later)
            await engine.drain()
            assert first.at_rest
            assert engine.handle("b").at_rest


async def test_a_snapshot_that_asks_for_something_else_is_not_mistaken_for_ours() -> None:
    """Another budget under a held id is refused, not silently ignored; after a discard it is a new rollout."""
    backend = ScriptedBackend(scripts(a=[[tokens(1), Hang()], [tokens(2, 3), finish()]]))
    async with engine_on(backend) as engine:
        handle = engine.submit(request("a", max_new_tokens=8))
        await until(lambda: bool(handle.rollout.tokens))
        await handle.abort()
        more = replace(handle.snapshot(), request=replace(handle.snapshot().request, max_new_tokens=9))
        with pytest.raises(DuplicateRollout, match="discard it"):
            engine.submit(more)
        engine.discard(handle)
        assert list((await engine.submit(more).wait()).tokens) == [1, 2, 3]
        assert backend.calls[-1].sampling_params["max_new_tokens"] == 8


async def test_a_backend_with_too_few_connections_is_refused() -> None:
    """A stream that waits for a connection would look like one in flight."""
    backend = ScriptedBackend(simple())
    backend.max_connections = 8
    with pytest.raises(ConfigurationError, match="max_in_flight=9 needs as many connections"):
        LifecycleEngine(backend, max_in_flight=9)
    assert LifecycleEngine(backend, max_in_flight=8).settings.max_in_flight == 8
