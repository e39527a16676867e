"""`generate_rollout` and `DataSource`: whole steps, and what is left of them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import adapters.slime
from adapters.slime import close_all, generate_rollout, runtime_for
from adapters.slime.datasource import partials_path
from lifecycle.call import Call
from lifecycle.errors import BackendUnreachable, ConfigurationError, SnapshotCorrupt, SnapshotTooNew
from lifecycle.events import ChannelData, EndKind, StreamEnd
from lifecycle.states import Reason
from lifecycle.testing.backend import Hang, ScriptedBackend, Step, finish, lost, tokens
from tests.adapters.slime.conftest import Slime, until
from tests.adapters.slime.test_hook import as_list

BROKEN = StreamEnd(EndKind.REJECTED, Reason.MALFORMED, "broken")


def quick(_: Call) -> list[Step]:
    """Two tokens and an end."""
    return [tokens(3, 4), finish()]


def number_of(call: Call) -> int:
    """The number in the prompt."""
    return int(bytes(call.input_ids[1:3]))


def slow_thirds(call: Call) -> list[Step]:
    """Every third prompt hangs at its first attempt."""
    if number_of(call) % 3 == 0 and call.attempt == 1:
        return [tokens(1, 2), Hang()]
    return quick(call)


def prompts(groups: list[list[Any]]) -> list[str]:
    """What was asked."""
    return [group[0].prompt for group in groups]


def test_a_step_returns_whole_rewarded_groups_in_order(slime: Slime) -> None:
    """The batch is exactly as large as asked for, sorted, finished and rewarded."""
    slime.backend = ScriptedBackend(quick)
    args = slime.args(rollout_batch_size=4)
    output = generate_rollout(args, 0, slime.data_source(args))
    assert len(output.samples) == 4
    indices = [sample.index for group in output.samples for sample in group]
    assert indices == sorted(indices)
    assert {s.status.name for group in output.samples for s in group} == {"COMPLETED"}
    assert {s.reward for group in output.samples for s in group} == {2.0}
    assert slime.engine(args).step == 0


def test_w3_every_prompt_is_delivered_exactly_once_over_many_steps(slime: Slime) -> None:
    """Over-sampled groups are kept with their tokens and delivered first: none is lost, none comes twice."""
    slime.backend = ScriptedBackend(slow_thirds)
    args = slime.args(rollout_batch_size=3, over_sampling_batch_size=5)
    source = slime.data_source(args)
    delivered: list[str] = []
    for step in range(5):
        output = generate_rollout(args, step, source)
        delivered += prompts(output.samples)
    undelivered = prompts(runtime_for(args).undelivered())
    drawn = source.sample_group_index
    assert Counter(delivered + undelivered) == Counter(f"p{number:02}" for number in range(drawn))
    assert output.metrics["rollout/lifecycle/carried_groups"] == len(undelivered)
    resumed = [s for s in output.samples[0] if s.response_length == 4]
    assert all(sample.tokens[3:] == [1, 2, 3, 4] for sample in resumed)
    assert slime.engine(args).ledger().balanced


def test_without_partial_rollouts_what_is_kept_begins_again(slime: Slime) -> None:
    """Prompts are not lost; their tokens are dropped at the resume."""
    slime.backend = ScriptedBackend(slow_thirds)
    args = slime.args(partial_rollout=False)
    source = slime.data_source(args)
    generate_rollout(args, 0, source)
    output = generate_rollout(args, 1, source)
    assert "p00" in prompts(output.samples)
    assert {sample.response_length for group in output.samples for sample in group} == {2}
    assert slime.engine(args).ledger().dropped


def test_slimes_mask_flag_spares_finished_siblings(slime: Slime) -> None:
    """`--mask-offpolicy-in-partial-rollout` means what it says: only tokens of older weights, sample by sample."""

    def script(call: Call) -> list[Step]:
        slow = call.sampling_params["sampling_seed"] == 43  # the second sample of each group
        if number_of(call) == 0 and slow and call.attempt == 1:
            return [tokens(1, version="1"), Hang()]
        return [tokens(3, version="1" if call.attempt == 1 else "2"), finish()]

    slime.backend = ScriptedBackend(script)
    args = slime.args(
        mask_offpolicy_in_partial_rollout=True,
        sglang_enable_deterministic_inference=True,
        rollout_batch_size=1,
        over_sampling_batch_size=2,
    )
    source = slime.data_source(args)
    assert prompts(generate_rollout(args, 0, source).samples) == ["p01"]
    output = generate_rollout(args, 1, source)
    assert prompts(output.samples) == ["p00"]
    assert [sample.loss_mask for sample in output.samples[0]] == [[1], [0, 1]]
    assert [sample.weight_versions for sample in output.samples[0]] == [["1"], ["1", "2"]]


def test_prefixes_that_are_too_old_begin_again(slime: Slime) -> None:
    """`max_staleness` counts the servers' labels, which slime changes between the steps without telling anybody."""

    def script(call: Call) -> list[Step]:
        if number_of(call) == 0 and call.attempt == 1:
            return [tokens(1, 2, version="1"), Hang()]
        return [tokens(3, 4, version="2"), finish()]

    slime.backend = ScriptedBackend(script)
    slime.backend.version = "1"
    args = slime.args(lifecycle_max_staleness=0, rollout_batch_size=1, over_sampling_batch_size=2)
    source = slime.data_source(args)
    assert prompts(generate_rollout(args, 0, source).samples) == ["p01"]
    slime.backend.version = "2"
    output = generate_rollout(args, 1, source)
    assert prompts(output.samples) == ["p00"]
    for sample in output.samples[0]:
        assert sample.tokens[3:] == [3, 4]
        assert sample.weight_versions == ["2"]
        assert sample.loss_mask == [1, 1]
    assert slime.engine(args).ledger().dropped == {"stale": 4}


def test_a_step_that_is_over_draws_no_more(slime: Slime) -> None:
    """A draw that the end overtakes is waited for, one that has not begun is not made: the cursor can be saved at once."""
    slime.backend = ScriptedBackend(quick)
    args = slime.args()
    source = slime.data_source(args)
    entered, release = threading.Event(), threading.Event()
    original = source.get_samples

    def held(count: int) -> Any:
        entered.set()
        assert release.wait(10)
        return original(count)

    source.get_samples = held

    async def scenario() -> None:
        step = adapters.slime.rollout.Step(args, 0, source, runtime_for(args))
        draw = step._draw()
        drawing = asyncio.ensure_future(anext(draw))
        await until(entered.is_set)
        stopping = asyncio.ensure_future(step._stop_drawing())
        await asyncio.sleep(0.01)
        assert not stopping.done()
        release.set()
        await stopping
        assert len(await drawing) == 2
        assert [group async for group in draw] == []
        assert [group async for group in step._draw()] == []

    asyncio.run(scenario())
    assert source.sample_group_index == 1


def test_failed_groups_are_not_trained_on(slime: Slime) -> None:
    """A group with a failed sample is left out, counted, and asked for no reward."""
    slime.backend = ScriptedBackend(lambda call: [BROKEN] if number_of(call) == 0 else quick(call))
    args = slime.args(rollout_all_samples_process_path="slime_test_rewards.process")
    seen: list[Any] = []
    slime.patch.setattr(
        "slime_test_rewards.process",
        lambda args, groups, source: seen.extend(groups),
        raising=False,
    )
    output = generate_rollout(args, 0, slime.data_source(args))
    assert "p00" not in prompts(output.samples)
    assert output.metrics["rollout/lifecycle/failed_groups"] == 1
    failed = next(group for group in seen if group[0].prompt == "p00")
    assert {sample.status.name for sample in failed} == {"FAILED"}
    assert {sample.reward for sample in failed} == {None}


def test_dynamic_filters_drop_groups_and_are_counted(slime: Slime) -> None:
    """A refused group is replaced by another one; the reason is in the metrics under slime's own name."""

    def odd(_args: Any, samples: list[Any]) -> Any:
        keep = int(samples[0].prompt[1:]) % 2 == 1
        output = __import__("sys").modules["slime.rollout.filter_hub.base_types"].DynamicFilterOutput
        return output(keep=keep, reason=None if keep else "even")

    slime.backend = ScriptedBackend(quick)
    slime.patch.setattr("slime_test_rewards.odd", odd, raising=False)
    args = slime.args(dynamic_sampling_filter_path="slime_test_rewards.odd", over_sampling_batch_size=2)
    output = generate_rollout(args, 0, slime.data_source(args))
    assert all(int(prompt[1:]) % 2 for prompt in prompts(output.samples))
    assert output.metrics["rollout/dynamic_filter/drop_even"] >= 1
    assert output.metrics["rollout/lifecycle/filtered_groups"] >= 1


def test_group_rewards_hooks_and_sample_filters_run_as_in_slime(slime: Slime) -> None:
    """`--group-rm`, `--rollout-sample-hook-path` and `--rollout-sample-filter-path` are honoured, in slime's loop."""
    where: list[str] = []

    async def hook(_args: Any, sample: Any, **_: Any) -> Any:
        where.append(threading.current_thread().name)
        sample.label = "seen"
        return sample

    def sample_filter(_args: Any, data: list[list[Any]]) -> None:
        data[0][0].remove_sample = True

    slime.backend = ScriptedBackend(quick)
    slime.patch.setattr("slime_test_rewards.hook", hook, raising=False)
    slime.patch.setattr("slime_test_rewards.filter", sample_filter, raising=False)
    args = slime.args(
        group_rm=True,
        rollout_sample_hook_path=["slime_test_rewards.hook"],
        rollout_sample_filter_path="slime_test_rewards.filter",
    )
    output = generate_rollout(args, 0, slime.data_source(args))
    samples = [sample for group in output.samples for sample in group]
    assert {sample.label for sample in samples} == {"seen"}
    assert {sample.reward for sample in samples} == {2.0}
    assert [sample.remove_sample for sample in samples] == [True, False, False, False]
    assert "lifecycle-slime" not in where


def test_a_reward_that_raises_loses_nothing(slime: Slime) -> None:
    """The exception reaches slime as it is, and the next call delivers what was generated."""
    slime.backend = ScriptedBackend(quick)
    args = slime.args()
    source = slime.data_source(args)

    broken = [True]

    async def moody(_args: Any, _sample: Any) -> float:
        if broken[0]:
            raise ZeroDivisionError("no reward today")
        return 1.0

    slime.patch.setattr("slime_test_rewards.reward", moody)
    with pytest.raises(ZeroDivisionError, match="no reward today"):
        generate_rollout(args, 0, source)
    broken[0] = False
    drawn = source.sample_group_index
    output = generate_rollout(args, 1, source)
    assert set(prompts(output.samples)) <= {f"p{number:02}" for number in range(drawn)}
    # One request each, and one more to resume what the exception had ended in flight: nothing whole is made again.
    assert max(Counter(call.rollout_id for call in slime.backend.calls).values()) <= 2


def test_servers_that_stay_away_are_named_and_nothing_is_lost(slime: Slime) -> None:
    """After the time-out the call fails with a sentence; what was whole by then is delivered by the next one."""
    down = threading.Event()

    def script(call: Call) -> list[Step]:
        if down.is_set() and number_of(call) > 0:
            return [lost(Reason.UNREACHABLE)]
        down.set()
        return quick(call)

    slime.backend = ScriptedBackend(script)
    args = slime.args(n_samples_per_prompt=1, rollout_batch_size=2, lifecycle_unreachable_timeout=0.3)
    source = slime.data_source(args)
    with pytest.raises(BackendUnreachable, match=r"rollout 0: 1 of 2 groups: no server has accepted"):
        generate_rollout(args, 0, source)
    slime.backend.script = quick
    assert prompts(generate_rollout(args, 1, source).samples) == ["p00", "p01"]


def test_a_data_source_that_runs_dry_is_named(slime: Slime) -> None:
    """Too few prompts for a batch: the call says so and keeps what it has."""
    slime.backend = ScriptedBackend(quick)
    args = slime.args(rollout_batch_size=5)
    source = slime.data_source(args)
    original, left = source.get_samples, [3]

    def few(count: int) -> Any:
        left[0] -= 1
        return original(count) if left[0] >= 0 else []

    source.get_samples = few
    with pytest.raises(ConfigurationError, match="rollout 0: 3 of 5 groups: the data source has no more"):
        generate_rollout(args, 0, source)
    left[0] = 10
    assert prompts(generate_rollout(args, 1, source).samples) == [f"p{n:02}" for n in range(5)]


def test_evaluation_is_slimes_own_with_our_generate(slime: Slime) -> None:
    """`evaluation=True` runs slime's evaluation; its samples go through our hook though no flag names it."""
    if slime.module.generate_rollout.__module__ != "tests.adapters.slime.doubles":
        pytest.skip("slime's own evaluation needs a data set on disk")
    slime.backend = ScriptedBackend(quick)
    args = slime.args(
        custom_generate_function_path=None, eval_samples=[slime.sample(prompt=f"p{n:02}") for n in range(3)]
    )
    output = generate_rollout(args, 0, None, evaluation=True)
    assert [sample.response for sample in output.data["eval"]["samples"]] == ["<3><4>"] * 3
    assert args.custom_generate_function_path is None


# -- checkpoints ---------------------------------------------------------------------------------------------------


def fields(samples: list[list[Any]]) -> list[list[dict[str, Any]]]:
    """Everything of every sample."""
    return [[sample.to_dict() for sample in group] for group in samples]


def test_w14_a_checkpoint_holds_cursor_and_partial_groups_in_one_cut(slime: Slime) -> None:
    """After a restart every prompt is there exactly once, and partial samples go on from their tokens."""
    slime.backend = ScriptedBackend(slow_thirds)
    args = slime.args(rollout_batch_size=3, over_sampling_batch_size=5)
    source = slime.data_source(args, kind=adapters.slime.DataSource)
    delivered = prompts(generate_rollout(args, 0, source).samples)
    source.save(0)
    kept = runtime_for(args).undelivered()
    before = fields(kept)
    close_all()  # the process ends here

    again = slime.data_source(args, kind=adapters.slime.DataSource)
    again.load(0)
    assert fields(again.buffer) == before
    calls = len(slime.backend.calls)
    delivered += prompts(generate_rollout(args, 1, again).samples)
    resumed = [call.input_ids[3:] for call in slime.backend.calls[calls:] if len(call.input_ids) > 3]
    assert resumed
    assert all(kept_tokens == [1, 2] for kept_tokens in resumed)
    undelivered = prompts([*runtime_for(args).undelivered(), *again.buffer])
    assert Counter(delivered + undelivered) == Counter(f"p{n:02}" for n in range(again.sample_group_index))


def test_a_checkpoint_includes_what_slimes_own_loop_handed_back(slime: Slime) -> None:
    """Groups in slime's buffer are saved too, when only the `generate` hook is used."""
    slime.backend = ScriptedBackend(slow_thirds)
    args = slime.args()
    source = slime.data_source(args, kind=adapters.slime.DataSource)
    slime.module.generate_rollout(args, 0, source)
    assert source.buffer
    source.save(0)
    again = slime.data_source(args, kind=adapters.slime.DataSource)
    again.load(0)
    assert fields(again.buffer) == fields(source.buffer)


def test_a_checkpoint_keeps_per_token_arrays(slime: Slime) -> None:
    """Kept ids of top-p sampling come back as they were, and the sample can be finished with them."""
    rows = ChannelData("top_p_token_ids", b"[[1,7],[2]]", 0, complete=True)
    last = ChannelData("top_p_token_ids", b"[[3,8]]", 0, complete=True)
    slime.backend = ScriptedBackend(
        lambda call: (
            [tokens(1, 2), rows, Hang()]
            if call.attempt == 1 and number_of(call) == 0
            else [tokens(3), last, finish()]
        )
    )
    args = slime.args(
        rollout_top_p=0.9, n_samples_per_prompt=1, rollout_batch_size=1, over_sampling_batch_size=2
    )
    source = slime.data_source(args, kind=adapters.slime.DataSource)
    assert prompts(generate_rollout(args, 0, source).samples) == ["p01"]
    source.save(0)
    close_all()
    again = slime.data_source(args, kind=adapters.slime.DataSource)
    again.load(0)
    partial = next(group[0] for group in again.buffer if group[0].prompt == "p00")
    assert as_list(partial.rollout_top_p_token_offsets) == [0, 2, 3]
    slime.backend.script = lambda _: [tokens(3), last, finish()]
    (group,) = generate_rollout(args, 1, again).samples
    assert group[0].tokens[3:] == [1, 2, 3]
    assert as_list(group[0].rollout_top_p_token_ids) == [1, 7, 2, 3, 8]
    assert as_list(group[0].rollout_top_p_token_offsets) == [0, 2, 3, 5]


def test_a_checkpoint_without_partial_groups_loads_slimes_cursor(slime: Slime) -> None:
    """A checkpoint of slime's own data source can be gone on from."""
    args = slime.args()
    slime.data_source(args).save(3)
    source = slime.data_source(args, kind=adapters.slime.DataSource)
    source.load(3)
    assert source.buffer == []


def test_damaged_or_newer_checkpoints_are_refused(slime: Slime) -> None:
    """Never a silent partial read: the file is named, and what is wrong with it."""
    args = slime.args()
    source = slime.data_source(args, kind=adapters.slime.DataSource)
    source.add_samples([[slime.sample(), slime.sample(index=1)]])
    source.save(0)
    path = partials_path(str(slime.folder), 0)
    good = path.read_bytes()
    for bad, error, words in (
        (good[:10], SnapshotCorrupt, "10 bytes are too few"),
        (b"X" + good[1:], SnapshotCorrupt, "not a file of partial samples"),
        (good[:-20] + b"\0" + good[-19:], SnapshotCorrupt, "length or checksum"),
        (good[:4] + b"\x09\x00" + good[6:], SnapshotTooNew, "schema 9"),
    ):
        path.write_bytes(bad)
        with pytest.raises(error, match=words) as caught:
            source.load(0)
        assert str(path) in str(caught.value)


def test_samples_that_cannot_be_saved_are_named(slime: Slime) -> None:
    """The checkpoint is not written rather than written without them, and slime's cursor is not written either."""
    args = slime.args()
    source = slime.data_source(args, kind=adapters.slime.DataSource)
    source.add_samples([[slime.sample(metadata={"tool": object()}), slime.sample(index=1)]])
    with pytest.raises(ConfigurationError, match="sample 0 of group 0 cannot be saved: its metadata"):
        source.save(0)
    assert list(Path(slime.folder).rglob("*_0.*")) == []


def test_without_a_global_data_set_nothing_is_saved(slime: Slime) -> None:
    """As in slime: such a data source has no cursor."""
    args = slime.args(rollout_global_dataset=False)
    source = slime.data_source(args, kind=adapters.slime.DataSource)
    source.args = args
    slime.patch.setattr(adapters.slime.DataSource.__base__, "save", lambda self, rollout_id: None)
    source.save(0)
    assert not partials_path(str(slime.folder), 0).exists()


def test_a_hook_and_a_step_do_not_fight_over_a_sample(slime: Slime) -> None:
    """A group that slime's own loop left partial can be finished by a whole step of ours."""
    slime.backend = ScriptedBackend(slow_thirds)
    args = slime.args()
    source = slime.data_source(args)
    slime.module.generate_rollout(args, 0, source)
    assert source.buffer
    slime.backend.script = quick
    output = generate_rollout(args, 1, source)
    partial = [s for group in output.samples for s in group if s.response_length == 4]
    assert partial
    assert all(sample.tokens[3:] == [1, 2, 3, 4] for sample in partial)
    assert slime.engine(args).ledger().balanced


def test_steps_run_in_slimes_loop_and_can_be_cancelled(slime: Slime) -> None:
    """A cancelled step delivers nothing and keeps everything; its requests end on the servers."""
    slime.backend = ScriptedBackend(lambda _: [tokens(1, 2), Hang()])
    args = slime.args()
    source = slime.data_source(args)
    step = adapters.slime.rollout.Step(args, 0, source, runtime_for(args))

    async def scenario() -> None:
        task = asyncio.create_task(step.run())
        await until(lambda: slime.engine(args).stats().observed_tokens >= 6)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    slime.run(scenario())
    slime.run(until(lambda: slime.engine(args).stats().in_flight == 0))
    assert len(runtime_for(args).undelivered()) == source.sample_group_index
    slime.backend.script = quick
    output = generate_rollout(args, 1, source)
    assert {s.tokens[3] for group in output.samples for s in group} == {1}
