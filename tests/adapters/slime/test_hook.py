"""The weaknesses of slime's own request handling that a hook can cure (frameworks survey, W1 to W20), one by one."""

from __future__ import annotations

import asyncio
import copy
import json
import struct
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from adapters.slime import close_all, generate, keep_whole
from lifecycle.call import Call
from lifecycle.errors import ConfigurationError
from lifecycle.events import ChannelData, EndKind, StreamEnd, StreamEvent, token_slice
from lifecycle.states import FinishReason, Reason
from lifecycle.stores import SqliteStore
from lifecycle.testing.backend import Hang, ScriptedBackend, Step, finish, lost, tokens
from tests.adapters.slime.conftest import Slime, until

CANCELLED_END = StreamEnd(EndKind.ENDED, Reason.SERVER_ABORT, "Aborted")


def then(first: Sequence[Step], *later: Sequence[Step]) -> Callable[[Call], Sequence[Step]]:
    """One script per attempt of a rollout; the last one for all that follow."""
    scripts = [first, *later]
    return lambda call: scripts[min(call.attempt, len(scripts)) - 1]


def call_once(slime: Slime, args: Any, sample: Any, **params: Any) -> Any:
    """One sample through slime's `generate_and_rm`."""
    values = {**slime.state(args).sampling_params, **params}
    return slime.run(slime.module.generate_and_rm(args, sample, values))


async def started(slime: Slime, args: Any, samples: Sequence[Any]) -> asyncio.Task[Any]:
    """A group under way, as slime's own loop submits it."""
    state = slime.state(args)
    call = slime.module.generate_and_rm_group(args, list(samples), state.sampling_params.copy())
    task = asyncio.create_task(call)
    state.pendings.add(task)
    return task


def abort_when(slime: Slime, args: Any, samples: Sequence[Any], ready: Callable[[], bool]) -> list[Any]:
    """Start a group, run slime's `abort` once it is ready, and return what slime hands back."""

    async def scenario() -> list[Any]:
        await started(slime, args, samples)
        await until(ready)
        back: list[Any] = await slime.module.abort(args, 7)
        slime.state(args).reset()
        return back

    return slime.run(scenario())


def held(slime: Slime, args: Any, count: int) -> Callable[[], bool]:
    """Whether the engine has seen that many tokens."""
    return lambda: slime.engine(args).stats().observed_tokens >= count


# -- what ends how -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (finish(FinishReason.STOP), "COMPLETED"),
        (finish(FinishReason.LENGTH), "TRUNCATED"),
        (StreamEnd(EndKind.REJECTED, Reason.MALFORMED, "unknown finish type 'new'"), "FAILED"),
        (StreamEnd(EndKind.REFUSED, Reason.REFUSED, "bad request", status=400), "FAILED"),
    ],
    ids=["stop", "length", "unknown finish (W5)", "refused (W10)"],
)
def test_statuses_map_one_to_one(slime: Slime, end: StreamEnd, status: str) -> None:
    """Every end has its status; what failed is kept out of training and says why, and nobody's task dies of it."""
    slime.backend = ScriptedBackend(lambda _: [tokens(5, 6), end])
    args = slime.args()
    sample = call_once(slime, args, slime.sample())
    assert sample.status.name == status
    assert sample.tokens == [97, 98, 5, 6]
    assert sample.response == "<5><6>"
    assert sample.rollout_log_probs == [-0.5, -0.5]
    assert sample.loss_mask == [1, 1]
    assert sample.remove_sample is (status == "FAILED")
    assert sample.metadata["lifecycle"]["detail"] == end.detail
    assert keep_whole(args, [sample]) is (status != "FAILED")


def test_a_failed_sample_may_be_tried_again(slime: Slime) -> None:
    """It goes on from its tokens under a fresh id, and may be trained on once it is whole."""
    slime.backend = ScriptedBackend(lambda call: [tokens(5), lost(Reason.MALFORMED)])
    slime.backend.script = lambda _: [tokens(5), StreamEnd(EndKind.REJECTED, Reason.MALFORMED, "no")]
    args = slime.args()
    sample = call_once(slime, args, slime.sample())
    first = sample.metadata["lifecycle"]["id"]
    slime.backend.script = lambda _: [tokens(6), finish()]
    sample = call_once(slime, args, sample)
    assert (sample.status.name, sample.remove_sample) == ("COMPLETED", False)
    assert sample.tokens == [97, 98, 5, 6]
    assert sample.metadata["lifecycle"]["id"] != first


def test_finished_samples_pass_through_untouched(slime: Slime) -> None:
    """A sample that slime has as COMPLETED makes no request."""
    slime.backend = ScriptedBackend(lambda _: [finish()])
    sample = slime.sample(status=slime.sample_class.Status.COMPLETED, reward=1.0)
    before = copy.deepcopy(vars(sample))
    assert vars(slime.run(generate(slime.args(), sample, {}))) == before
    assert slime.backend.calls == []


# -- W1: late cancels ----------------------------------------------------------------------------------------------


def test_w1_a_finish_that_beats_the_abort_stays_a_finish(slime: Slime) -> None:
    """The server's `stop` answers our abort: the sample is COMPLETED, rewarded, and its group is not handed back."""
    slime.backend = ScriptedBackend(lambda _: [tokens(5, 6), Hang(end=finish())])
    args, sample = slime.args(n_samples_per_prompt=1), slime.sample()
    assert abort_when(slime, args, [sample], held(slime, args, 2)) == []
    assert sample.status.name == "COMPLETED"
    assert sample.reward == 2.0


def test_w1_a_cancel_after_the_end_changes_nothing(slime: Slime) -> None:
    """The rollout is over, slime's task has not heard of it yet and is cancelled: COMPLETED all the same."""
    slime.backend = ScriptedBackend(lambda _: [tokens(5, 6), finish()])
    args, sample = slime.args(n_samples_per_prompt=1), slime.sample()
    engine = slime.engine(args)

    async def scenario() -> list[Any]:
        task = await started(slime, args, [sample])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        limit = time.monotonic() + 10
        while engine.ledger().rollouts["delivered"] == 0:  # holds slime's loop, so that it cannot hear
            assert time.monotonic() < limit
            time.sleep(0.002)  # noqa: ASYNC251
        back: list[Any] = await slime.module.abort(args, 7)
        assert task.done()
        return back

    assert slime.run(scenario()) == []
    assert sample.status.name == "COMPLETED"


# -- W2, W15: versions ---------------------------------------------------------------------------------------------


def test_w2_w15_an_aborted_sample_knows_its_weights_token_by_token(slime: Slime) -> None:
    """Versions are recorded with the tokens, not with the end of a call, and say which tokens they mean."""
    slime.backend = ScriptedBackend(
        then([tokens(1, version="3"), tokens(2, version="4"), Hang()], [tokens(3, version="5"), finish()])
    )
    args, sample = slime.args(n_samples_per_prompt=1), slime.sample()
    back = abort_when(slime, args, [sample], held(slime, args, 2))
    assert back == [[sample]]
    assert sample.status.name == "ABORTED"
    assert sample.weight_versions == ["3", "4"]
    sample = call_once(slime, args, sample)
    assert sample.weight_versions == ["3", "4", "5"]
    assert sample.metadata["lifecycle"]["spans"] == [["3", 0, 1], ["4", 1, 2], ["5", 2, 3]]
    assert sample.metadata["start_rollout_id"] == 7


# -- cancellation by others ----------------------------------------------------------------------------------------


def test_foreign_cancellation_goes_on_and_the_prefix_is_kept(slime: Slime) -> None:
    """A cancel that is not slime's abort is re-raised, even while slime aborts; the server was told all the same."""
    slime.backend = ScriptedBackend(lambda _: [tokens(5, 6), Hang()])
    args, sample = slime.args(n_samples_per_prompt=1), slime.sample()

    async def scenario() -> None:
        state = slime.state(args)
        task = asyncio.create_task(slime.module.generate_and_rm(args, sample, dict(state.sampling_params)))
        await until(held(slime, args, 2))
        state.aborted = True
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    slime.run(scenario())
    assert sample.tokens == [97, 98, 5, 6]
    assert sample.status.name == "ABORTED"
    assert len(slime.backend.aborted) >= 1


def test_a_second_cancel_waits_for_the_abort_and_then_goes_on(slime: Slime) -> None:
    """Somebody cancels while slime's abort is on its way: nothing is left on the server, and the cancel is raised."""
    release = threading.Event()

    class Slow(ScriptedBackend):
        async def abort(self, calls: Any, **options: Any) -> Any:
            await until(release.is_set)
            return await super().abort(calls, **options)

    slime.backend = Slow(lambda _: [tokens(5, 6), Hang()])
    args, sample = slime.args(n_samples_per_prompt=1), slime.sample()

    async def scenario() -> None:
        state = slime.state(args)
        params = dict(state.sampling_params)
        task = asyncio.create_task(slime.module.generate_and_rm(args, sample, params))
        await until(held(slime, args, 2))
        state.aborted = True
        state.cancellable_tasks.clear()
        task.cancel()
        await until(lambda: slime.engine(args).stats().aborts_unresolved == 1)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        release.set()
        await asyncio.wait([task])
        # slime's wrapper takes any cancel of a task outside its set for its own abort.
        assert sample.tokens == [97, 98, 5, 6]

    slime.run(scenario())
    assert slime.backend.live == {}
    assert sample.status.name == "ABORTED"


def test_slimes_own_cancel_is_used_up(slime: Slime) -> None:
    """After an abort the task is not taken for cancelled, so time-outs of reward models go on working."""
    slime.backend = ScriptedBackend(lambda _: [tokens(5), Hang(end=finish())])
    args, sample = slime.args(n_samples_per_prompt=1), slime.sample()
    pending: list[int] = []

    async def rate(_args: Any, _sample: Any) -> float:
        task = asyncio.current_task()
        assert task is not None
        pending.append(task.cancelling())
        return 1.0

    slime.patch.setattr("slime_test_rewards.reward", rate)
    abort_when(slime, args, [sample], held(slime, args, 1))
    assert sample.reward == 1.0
    assert pending == [0]


# -- W11, resuming -------------------------------------------------------------------------------------------------


def test_w11_the_budget_is_computed_and_the_parameters_are_read_only(slime: Slime) -> None:
    """Two calls with one dict of parameters: the second asks for what is left, and the dict is as it was."""
    slime.backend = ScriptedBackend(then([tokens(1, 2, 3), Hang()], [tokens(4), finish()]))
    args, sample = slime.args(), slime.sample()
    params = {"max_new_tokens": 8, "min_new_tokens": 4, "temperature": 1.0}

    async def scenario() -> None:
        task = asyncio.create_task(generate(args, sample, params))
        await until(held(slime, args, 3))
        task.cancel()
        await asyncio.wait([task])
        await generate(args, copy.deepcopy(sample), params)

    slime.run(scenario())
    assert params == {"max_new_tokens": 8, "min_new_tokens": 4, "temperature": 1.0}
    first, second = slime.backend.calls
    assert first.sampling_params == params
    assert second.sampling_params == {"max_new_tokens": 5, "min_new_tokens": 1, "temperature": 1.0}
    assert second.input_ids == [97, 98, 1, 2, 3]
    assert second.rollout_id == first.rollout_id


def test_a_sample_without_budget_is_truncated_without_a_request(slime: Slime) -> None:
    """Everything is generated already: TRUNCATED, as slime has it."""
    slime.backend = ScriptedBackend(lambda _: [finish()])
    sample = slime.sample(
        tokens=[97, 98, 1, 2],
        response="<1><2>",
        response_length=2,
        rollout_log_probs=[-1.0, -1.0],
        status=slime.sample_class.Status.ABORTED,
    )
    assert call_once(slime, slime.args(), sample, max_new_tokens=2).status.name == "TRUNCATED"
    assert slime.backend.calls == []


def test_a_requeued_sample_goes_on_in_another_process(slime: Slime) -> None:
    """An engine that has never seen the sample takes its prefix, log-probs and versions over from slime."""
    slime.backend = ScriptedBackend(lambda _: [tokens(1, 2, version="3"), Hang()])
    args, sample = slime.args(n_samples_per_prompt=1), slime.sample()
    abort_when(slime, args, [sample], held(slime, args, 2))
    close_all()
    slime.backend = ScriptedBackend(lambda _: [tokens(3, version="4"), finish()])
    sample = call_once(slime, args, slime.sample_class.from_dict(sample.to_dict()))
    assert slime.backend.calls[0].input_ids == [97, 98, 1, 2]
    assert sample.tokens == [97, 98, 1, 2, 3]
    assert sample.metadata["lifecycle"]["spans"] == [["3", 0, 2], ["4", 2, 3]]
    assert sample.weight_versions == ["3", "4"]


def test_a_sample_that_slime_changed_is_taken_as_slime_has_it(slime: Slime) -> None:
    """Tokens cut off by somebody else: the engine's copy is given up and slime's goes on, under a fresh id."""
    slime.backend = ScriptedBackend(then([tokens(1, 2), Hang()], [tokens(9), finish()]))
    args, sample = slime.args(n_samples_per_prompt=1), slime.sample()
    abort_when(slime, args, [sample], held(slime, args, 2))
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        setattr(sample, name, getattr(sample, name)[:-1])
    sample.response_length = 1
    slime.backend.script = lambda _: [tokens(9), finish()]
    sample = call_once(slime, args, sample)
    assert sample.tokens == [97, 98, 1, 9]
    assert slime.engine(args).ledger().balanced


# -- W16: loss masks -----------------------------------------------------------------------------------------------


def test_what_slime_has_masked_is_only_appended_to(slime: Slime) -> None:
    """With slime's own flag the old tokens stay zero, and the new ones are one."""
    slime.backend = ScriptedBackend(then([tokens(1, 2), Hang()], [tokens(3, 4), finish()]))
    args = slime.args(n_samples_per_prompt=1, mask_offpolicy_in_partial_rollout=True)
    sample = slime.sample()
    abort_when(slime, args, [sample], held(slime, args, 2))
    assert call_once(slime, args, sample).loss_mask == [0, 0, 1, 1]


def test_w16_our_mask_spares_finished_siblings(slime: Slime) -> None:
    """Only tokens older than the newest of their own sample are masked: never a finished sibling's."""
    slime.backend = ScriptedBackend(
        lambda call: (
            [tokens(1, 2, version="3"), finish()]
            if call.input_ids[0] == ord("x")
            else then([tokens(1, 2, version="3"), Hang()], [tokens(3, version="4"), finish()])(call)
        )
    )
    args = slime.args(lifecycle_mask_off_policy=True)
    whole, partial = slime.sample(prompt="x"), slime.sample(prompt="y", index=1)
    back = abort_when(
        slime, args, [whole, partial], lambda: whole.reward is not None and held(slime, args, 4)()
    )
    assert back == [[whole, partial]]
    slime.run(slime.module.generate_and_rm_group(args, back[0], slime.state(args).sampling_params.copy()))
    assert whole.loss_mask == [1, 1]
    assert partial.loss_mask == [0, 0, 1]
    assert partial.status.name == "COMPLETED"


def test_a_missing_logprob_is_not_trained_on(slime: Slime) -> None:
    """A null from the server becomes 0.0 with a zero in the loss mask, not a NaN in the gradient."""
    slime.backend = ScriptedBackend(lambda _: [token_slice([(-1.0, 1), (None, 2), (-2.0, 3)]), finish()])
    sample = call_once(slime, slime.args(), slime.sample())
    assert sample.rollout_log_probs == [-1.0, 0.0, -2.0]
    assert sample.loss_mask == [1, 0, 1]
    assert sample.metadata["lifecycle"]["untrainable"] == 1


# -- W12: channels -------------------------------------------------------------------------------------------------


def kept(start: int, *rows: Sequence[int]) -> ChannelData:
    """Kept ids of top-p sampling, one row per token."""
    return ChannelData(
        "top_p_token_ids", json.dumps([list(row) for row in rows]).encode(), start, complete=True
    )


def as_list(value: Any) -> Any:
    """Of a list or a tensor."""
    return value.tolist() if hasattr(value, "tolist") else value


def test_w12_top_p_arrays_fit_after_any_number_of_aborts(slime: Slime) -> None:
    """Rows of every attempt are joined; rows that a broken stream never sent are empty and not trained on."""
    slime.backend = ScriptedBackend(
        then(
            [tokens(1, 2), kept(0, [1, 9], [2]), Hang()],
            [tokens(3), lost()],
            [tokens(4), kept(0, [4, 5, 6]), finish()],
        )
    )
    args, sample = slime.args(n_samples_per_prompt=1, rollout_top_p=0.9), slime.sample()
    abort_when(slime, args, [sample], held(slime, args, 2))
    assert as_list(sample.rollout_top_p_token_offsets) == [0, 2, 3]
    sample = call_once(slime, args, sample)
    assert sample.status.name == "COMPLETED"
    assert as_list(sample.rollout_top_p_token_ids) == [1, 9, 2, 4, 5, 6]
    assert as_list(sample.rollout_top_p_token_offsets) == [0, 2, 3, 3, 6]
    assert sample.loss_mask == [1, 1, 0, 1]


def test_w12_a_prefix_without_top_p_rows_is_padded_and_masked(slime: Slime) -> None:
    """A sample that was begun without the arrays can still be finished with them."""
    slime.backend = ScriptedBackend(lambda _: [tokens(3), kept(0, [3, 4]), finish()])
    sample = slime.sample(
        tokens=[97, 98, 1, 2],
        response_length=2,
        rollout_log_probs=[-1.0, -1.0],
        loss_mask=[1, 1],
        status=slime.sample_class.Status.ABORTED,
    )
    sample = call_once(slime, slime.args(rollout_top_p=0.9), sample)
    assert as_list(sample.rollout_top_p_token_offsets) == [0, 0, 0, 2]
    assert sample.loss_mask == [0, 0, 1]


def experts(call: Call, generated: int) -> ChannelData:
    """One int32 per layer for all of the sequence but its last token, as the last chunk of an attempt has it."""
    rows = len(call.input_ids) + generated - 1
    data = struct.pack(f"<{rows * 2}i", *range(rows * 2))
    return ChannelData("routed_experts", data, -len(call.input_ids), complete=True)


def test_w12_routed_experts_cover_the_whole_sequence_after_aborts(slime: Slime) -> None:
    """The last attempt's rows replace the earlier ones and fit the sample exactly."""

    def script(call: Call) -> list[Step]:
        if call.attempt == 1:
            return [tokens(1, 2), Hang(end=None)]
        return [tokens(3, 4), experts(call, 2), finish()]

    slime.backend = ScriptedBackend(script)
    args = slime.args(n_samples_per_prompt=1, use_rollout_routing_replay=True, lifecycle_abort_timeout=0.05)
    sample = slime.sample()
    abort_when(slime, args, [sample], held(slime, args, 2))
    assert sample.rollout_routed_experts is None
    assert sample.metadata["lifecycle"]["incomplete"] == ["routed_experts"]
    sample = call_once(slime, args, sample)
    assert slime.backend.calls[0].extra == {"return_routed_experts": True}
    assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
    assert sample.metadata["lifecycle"]["incomplete"] == []


def test_routed_experts_of_another_length_are_left_out(slime: Slime) -> None:
    """Rows that do not fit the sequence are noted as incomplete instead of failing the sample."""
    bad = ChannelData("routed_experts", array("i", [1, 2, 3]).tobytes(), -2, complete=False)
    slime.backend = ScriptedBackend(lambda _: [tokens(1), bad, finish()])
    sample = call_once(slime, slime.args(use_rollout_routing_replay=True), slime.sample())
    assert sample.status.name == "COMPLETED"
    assert sample.metadata["lifecycle"]["incomplete"] == ["routed_experts"]


def test_the_store_of_an_engine_is_closed_with_it(slime: Slime, tmp_path: Path) -> None:
    """One file is left, and the rollout in it: no write-ahead log that waits for the garbage collector."""
    path = tmp_path / "run.db"
    slime.backend = ScriptedBackend(lambda _: [tokens(1, 2), Hang()])
    args, sample = slime.args(n_samples_per_prompt=1, lifecycle_store=str(path)), slime.sample()
    abort_when(slime, args, [sample], held(slime, args, 2))
    _kept = slime.engine(args)  # else the garbage collector might close its store
    close_all()
    assert list(tmp_path.glob("run.db*")) == [path]
    with SqliteStore(path, read_only=True) as store:
        assert len(store.rows()) == 1


# -- W17, W20, W6 --------------------------------------------------------------------------------------------------


def test_w17_every_transition_is_one_line(slime: Slime, tmp_path: Any) -> None:
    """The log names every arc of an aborted and resumed sample, with its reason and outcome."""
    log = tmp_path / "lifecycle.jsonl"
    slime.backend = ScriptedBackend(then([tokens(1, 2), Hang()], [tokens(3), finish()]))
    args, sample = slime.args(n_samples_per_prompt=1, lifecycle_log=str(log)), slime.sample()
    abort_when(slime, args, [sample], held(slime, args, 2))
    call_once(slime, args, sample)
    close_all()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    moves = [(line["trigger"], line["dest"]) for line in lines if line["event"] == "rollout.transition"]
    assert moves == [
        ("dispatch", "streaming"),
        ("observe", "partial"),
        ("abort", "aborting"),
        ("confirm", "aborted"),
        ("restore", "pending"),
        ("dispatch", "streaming"),
        ("observe", "partial"),
        ("finish", "completed"),
    ]
    abort = next(line for line in lines if line.get("trigger") == "confirm")
    assert (abort["reason"], abort["outcome"]) == ("over_sampled", "confirmed")


def test_w20_a_sample_that_cannot_take_its_tokens_is_left_as_it_was(slime: Slime) -> None:
    """Response tokens without log-probs: slime's method refuses half-way, and nothing of that half stays."""
    slime.backend = ScriptedBackend(lambda _: [tokens(3), finish()])
    sample = slime.sample(
        tokens=[97, 98, 1, 2], response_length=2, status=slime.sample_class.Status.ABORTED, loss_mask=[1, 1]
    )
    names = ("tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "status")
    before = [copy.deepcopy(getattr(sample, name)) for name in names]
    with pytest.raises(ConfigurationError, match="slime sample 0 of group 0 cannot take its tokens"):
        call_once(slime, slime.args(), sample)
    assert [getattr(sample, name) for name in names] == before


def test_w6_engines_do_not_share_an_abort(slime: Slime) -> None:
    """Two routers are two engines: what is aborted in one goes on in the other."""
    slime.backend = ScriptedBackend(lambda _: [tokens(1, 2), Hang()])
    one, other = slime.args(), slime.args(sglang_router_port=10)
    assert slime.engine(one) is not slime.engine(other)
    assert slime.engine(one) is slime.engine(slime.args())

    async def scenario() -> None:
        tasks = [
            asyncio.create_task(generate(args, slime.sample(), {"max_new_tokens": 8}))
            for args in (one, other)
        ]
        await until(lambda: held(slime, one, 2)() and held(slime, other, 2)())
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        assert not tasks[1].done()
        assert slime.engine(other).stats().in_flight == 1
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])

    slime.run(scenario())


# -- whole loops ---------------------------------------------------------------------------------------------------


class Unhurried(ScriptedBackend):
    """Groups 2 and 4 hang after two tokens, once, and nothing ends before both samples of group 2 have shown theirs."""

    def __init__(self) -> None:
        super().__init__(self._play)
        self._shown = 0
        self._both: anyio.Event | None = None

    def _play(self, call: Call) -> list[Step]:
        hangs = call.attempt == 1 and chr(call.input_ids[2]) in "24"
        return [tokens(1, 2), Hang()] if hangs else [tokens(3, 4), finish()]

    async def stream(self, call: Call) -> AsyncIterator[Sequence[StreamEvent]]:
        """Hold back what comes too early."""
        self._both = both = self._both or anyio.Event()
        async for batch in super().stream(call):
            if chr(call.input_ids[2]) != "2":
                await both.wait()
            yield batch
            self._shown += chr(call.input_ids[2]) == "2"
            if self._shown == 2:
                both.set()


def test_slimes_own_loop_hands_back_and_resumes(slime: Slime) -> None:
    """Two steps of slime's own rollout function: partial groups go through its buffer and finish with their tokens."""
    slime.backend = Unhurried()
    args = slime.args()
    source = slime.data_source(args)
    first = slime.module.generate_rollout(args, 0, source)
    second = slime.module.generate_rollout(args, 1, source)
    assert {group[0].group_index for group in first.samples} == {0, 1}
    assert {group[0].group_index for group in second.samples} == {2, 3}
    resumed = [sample for group in second.samples for sample in group if sample.response_length == 4]
    assert [sample.tokens[3:] for sample in resumed] == [[1, 2, 3, 4]] * 2
    assert slime.engine(args).ledger().balanced


def test_evaluation_may_repeat_indices_and_share_parameters(slime: Slime) -> None:
    """Samples of an evaluation have the indices of training samples, and one dict of parameters: no clash."""
    slime.backend = ScriptedBackend(lambda _: [tokens(3, 4), finish()])
    args = slime.args(n_samples_per_prompt=1)
    samples = [slime.sample(index=0, group_index=None) for _ in range(5)]
    params = {"max_new_tokens": 4}

    async def scenario() -> None:
        await asyncio.gather(*(slime.module.generate_and_rm(args, one, params, True) for one in samples))

    slime.run(scenario())
    assert {one.status.name for one in samples} == {"COMPLETED"}
    assert len({one.metadata["lifecycle"]["id"] for one in samples}) == 5
    assert params == {"max_new_tokens": 4}


def test_two_event_loops_share_one_engine(slime: Slime) -> None:
    """Slime's fully asynchronous mode runs a loop of its own beside the common one."""
    slime.backend = ScriptedBackend(lambda _: [tokens(3, 4), finish()])
    args = slime.args()
    slime.engine(args)

    async def some() -> set[str]:
        done = await asyncio.gather(
            *(generate(args, slime.sample(index=number), {"max_new_tokens": 4}) for number in range(10))
        )
        return {one.status.name for one in done}

    other: list[set[str]] = []
    thread = threading.Thread(target=lambda: other.append(asyncio.run(some())))
    slime.state(args)
    thread.start()
    assert slime.run(some()) == {"COMPLETED"}
    thread.join(10)
    assert other == [{"COMPLETED"}]


@pytest.mark.parametrize("keep", [True, False])
def test_nothing_stays_in_the_engine_that_nobody_will_ask_for(slime: Slime, keep: bool) -> None:
    """Without partial rollouts an aborted sample leaves the engine; with them it waits there for its return."""
    slime.backend = ScriptedBackend(lambda _: [tokens(1, 2), Hang()])
    args = slime.args(n_samples_per_prompt=1, partial_rollout=keep)
    abort_when(slime, args, [slime.sample()], held(slime, args, 2))
    assert list(slime.engine(args).places().values()) == (["resumable"] if keep else [])


def test_an_aborted_slime_starts_nothing(slime: Slime) -> None:
    """A call that comes while slime aborts is ABORTED without a request."""
    slime.backend = ScriptedBackend(lambda _: [finish()])
    args, sample = slime.args(), slime.sample()
    slime.state(args).aborted = True
    assert slime.run(generate(args, sample, {"max_new_tokens": 4})).status.name == "ABORTED"
    assert slime.backend.calls == []


# -- what cannot be sent -------------------------------------------------------------------------------------------


def test_what_cannot_be_sent_is_refused_by_name(slime: Slime) -> None:
    """Images, a list of messages, a budget that is no number, a prefix over the budget: what, where, what instead."""
    slime.backend = ScriptedBackend(lambda _: [finish()])
    args = slime.args()
    with pytest.raises(ConfigurationError, match=r"slime sample 0 of group 0 has image.* not supported yet"):
        slime.run(generate(args, slime.sample(multimodal_inputs={"images": ["x"]}), {"max_new_tokens": 4}))
    with pytest.raises(ConfigurationError, match="must be text, not list; --apply-chat-template"):
        slime.run(generate(args, slime.sample(prompt=[{"role": "user"}]), {"max_new_tokens": 4}))
    with pytest.raises(ConfigurationError, match=r"max_new_tokens'\] must be a whole number, not None"):
        slime.run(generate(args, slime.sample(), {}))
    long = slime.sample(tokens=[97, 1, 2], response_length=2, rollout_log_probs=[-1.0, -1.0])
    with pytest.raises(ConfigurationError, match="prefix of 2 tokens exceeds max_new_tokens=1"):
        slime.run(generate(args, long, {"max_new_tokens": 1}))


def test_the_session_is_the_routing_key_where_slime_hashes(slime: Slime) -> None:
    """Affinity is asked for under `consistent_hashing` only, as in slime."""
    slime.backend = ScriptedBackend(lambda _: [tokens(1), finish()])
    for policy, key in (("consistent_hashing", "abc"), ("cache_aware", None)):
        call_once(slime, slime.args(router_policy=policy), slime.sample(session_id="abc"))
        assert slime.backend.calls[-1].routing_key == key
