"""The stepped server: queue, tokens, endings, pauses and versions, without sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.sglang.simulator import BadBody, Brain, Mark, ServerDead, ServerSettings
from adapters.sglang.simulator.text import EOS_ID, decode, encode
from tests.adapters.sglang.simulator.stepped import PROMPT, Reader, body, expected, submit


@pytest.fixture(params=["cumulative", "incremental"])
def brain(request: pytest.FixtureRequest) -> Brain:
    """A server in either stream mode."""
    return Brain(ServerSettings(mode=request.param, seed=3, keep_history=True))


def test_one_token_per_step(brain: Brain) -> None:
    """A running request gets one token per step and its chunk is there at once."""
    reader = submit(brain)
    for count in range(1, 7):
        brain.step()
        reader.poll()
        assert reader.meta["completion_tokens"] == count
    assert reader.meta["finish_reason"] == {"type": "length", "length": 6}
    assert (reader.done, reader.mark) == (True, Mark.END)
    assert reader.request.tokens == expected(brain, 6)
    assert brain.idle
    assert brain.history == [reader.request]


def test_a_slow_reader_finds_merged_steps(brain: Brain) -> None:
    """Three steps between two polls are one chunk of three tokens more."""
    reader = submit(brain)
    brain.step()
    reader.poll()
    for _ in range(3):
        brain.step()
    reader.poll()
    assert [chunk["meta_info"]["completion_tokens"] for chunk in reader.chunks] == [1, 4]
    whole = expected(brain, 4)
    assert reader.chunks[1]["output_ids"] == (whole[1:] if brain.settings.incremental else whole)
    assert brain.poll(reader.request) == []


def test_requests_beyond_the_limit_wait_their_turn() -> None:
    """The queue is first come, first served."""
    brain = Brain(ServerSettings(max_running_requests=2))
    first, second, third = (submit(brain, rid, count) for rid, count in (("a", 2), ("b", 4), ("c", 3)))
    brain.step()
    assert [len(reader.request.tokens) for reader in (first, second, third)] == [1, 1, 0]
    brain.step()
    brain.step()
    assert [len(reader.request.tokens) for reader in (first, second, third)] == [2, 3, 1]


def test_a_full_queue_refuses_with_503() -> None:
    """Beyond ``max_queued_requests`` a request ends at once by a 503 abort in the shape of the queue."""
    brain = Brain(ServerSettings(max_running_requests=1, max_queued_requests=1))
    submit(brain, "a")
    brain.step()
    submit(brain, "b")
    refused = submit(brain, "c").finish()
    assert refused.meta["finish_reason"]["status_code"] == 503
    assert "prompt_tokens" not in refused.meta
    assert set(brain.live) == {"a", "b"}


def test_a_full_queue_refuses_a_plain_request_over_http() -> None:
    """Without a stream the same refusal is the HTTP status."""
    brain = Brain(ServerSettings(max_running_requests=1, max_queued_requests=0))
    reader = submit(brain, "c", stream=False)
    head = brain.head(reader.request)
    assert head is not None
    assert (head.status, json.loads(reader.finish().raw)["code"]) == (503, 503)


def test_eos_ends_and_is_kept_among_the_ids(brain: Brain) -> None:
    """An end-of-sequence token stays in the ids, has no text, and is named."""
    brain.model._eos_below = 1 << 20
    reader = submit(brain).finish()
    assert reader.meta["finish_reason"] == {"type": "stop", "matched": EOS_ID}
    assert reader.request.tokens == [EOS_ID]
    assert reader.chunks[-1]["text"] == ""


def test_ignore_eos_and_min_new_tokens() -> None:
    """``ignore_eos`` goes on over it; ``min_new_tokens`` keeps it from being sampled at all."""
    brain = Brain(ServerSettings(eos_probability=1.0))
    ignoring = submit(brain, "a", 4, sampling={"ignore_eos": True}).finish()
    assert ignoring.request.tokens == [EOS_ID] * 4
    minimum = submit(brain, "b", 9, sampling={"min_new_tokens": 3}).finish()
    assert len(minimum.request.tokens) == 4
    assert minimum.request.tokens.index(EOS_ID) == 3


def test_stop_string_is_withheld_while_it_may_come(brain: Brain) -> None:
    """No chunk ever shows a part of a stop string that then matches."""
    whole = expected(brain, 60)
    text = decode(whole)
    at = next(
        at for at in range(10, 50) if text[at : at + 3].isascii() and text.find(text[at : at + 3]) == at
    )
    stop = text[at : at + 3]
    reader = submit(brain, count=60, sampling={"stop": [stop]}).finish()
    assert reader.meta["finish_reason"] == {"type": "stop", "matched": stop}
    texts = [chunk["text"] for chunk in reader.chunks]
    shown = "".join(texts) if brain.settings.incremental else texts[-1]
    assert shown == text[: text.index(stop)]
    assert all(len(part) <= len(shown) for part in texts)
    assert reader.request.tokens == whole[: len(encode(text[: at + 3]))] or "\ufffd" in text[:at]


def test_no_stop_trim_keeps_the_stop_string(brain: Brain) -> None:
    """With ``no_stop_trim`` the text ends in the stop string."""
    text = decode(expected(brain, 40))
    stop = next(text[at : at + 2] for at in range(5, 30) if text[at : at + 2].isascii())
    reader = submit(brain, count=40, sampling={"stop": stop, "no_stop_trim": True}).finish()
    texts = [chunk["text"] for chunk in reader.chunks]
    assert ("".join(texts) if brain.settings.incremental else texts[-1]).endswith(stop)


def test_stream_interval_holds_tokens_back() -> None:
    """The first token comes at once, then every fourth; an abort in the queue loses what was held back."""
    brain = Brain(ServerSettings(mode="incremental", stream_interval=4))
    reader = submit(brain, count=40)
    for _ in range(8):
        brain.step()
        reader.poll()
    assert [chunk["meta_info"]["completion_tokens"] for chunk in reader.chunks] == [1, 5]
    brain.pause("retract")
    brain.abort("r")
    reader.finish()
    assert len(reader.request.tokens) == 8
    assert reader.meta["completion_tokens"] == 5


def test_abort_while_running_takes_one_more_token(brain: Brain) -> None:
    """The step in flight is finished before the abort is."""
    reader = submit(brain, count=50)
    brain.step()
    brain.step()
    brain.abort("r")
    assert brain.live
    brain.step()
    reader.poll()
    assert reader.meta["finish_reason"]["message"] == "Aborted"
    assert reader.meta["completion_tokens"] == 3
    assert brain.idle


def test_an_abort_in_flight_beats_the_natural_end(brain: Brain) -> None:
    """When the last token of the budget is the one in flight, the answer is still an abort."""
    reader = submit(brain, count=2)
    brain.step()
    brain.abort("r")
    reader.finish()
    assert reader.meta["completion_tokens"] == 2
    assert reader.meta["finish_reason"]["type"] == "abort"


def test_abort_rules_of_both_processes(brain: Brain) -> None:
    """An exact live rid is needed first; then everything that begins with it ends."""
    for rid in ("a1", "a10", "b1"):
        submit(brain, rid, 50)
    brain.step()
    brain.abort("a")
    brain.step()
    assert set(brain.live) == {"a1", "a10", "b1"}
    brain.abort("a1")
    brain.step()
    assert set(brain.live) == {"b1"}
    brain.abort(abort_all=True)
    brain.step()
    assert brain.idle


def test_queue_abort_shape_after_retraction() -> None:
    """Issue #40901: whole text and all logprobs again, the last id only; glued to a delta that was still unread."""
    brain = Brain(ServerSettings(mode="incremental", seed=3))
    read, unread = submit(brain, "read", 50), submit(brain, "unread", 50)
    brain.step()
    brain.step()
    read.poll()
    unread.poll()
    brain.step()
    read.poll()
    brain.pause("retract")
    brain.abort("read")
    brain.abort("unread")
    read.finish()
    unread.finish()
    tokens = expected(brain, 3)
    assert read.chunks[-1]["output_ids"] == tokens[-1:]
    assert [pair[1] for pair in read.meta["output_token_logprobs"]] == tokens
    assert read.chunks[-1]["text"] == decode(tokens)
    assert unread.chunks[-1]["output_ids"] == [tokens[2], tokens[2]]
    assert [pair[1] for pair in unread.meta["output_token_logprobs"]] == [tokens[2], *tokens]
    assert unread.meta["completion_tokens"] == unread.meta["output_token_logprobs_length"] == 3
    assert unread.chunks[-1]["text"] == decode(tokens[2:]) + decode(tokens)


def test_retraction_is_silent_and_counted(brain: Brain) -> None:
    """A retracted request comes again with the same tokens and says so in ``num_retractions``."""
    reader = submit(brain, count=5)
    brain.step()
    brain.pause("retract")
    assert (len(brain.scheduler.running), len(brain.scheduler.waiting)) == (0, 1)
    assert brain.step() == 0
    brain.resume()
    reader.finish()
    assert reader.meta["num_retractions"] == 1
    assert reader.request.tokens == expected(brain, 5)


def test_memory_pressure_retracts_the_newest_and_ends_the_last() -> None:
    """Beyond ``max_total_tokens`` the newest request waits; one that fits nowhere ends with a 500 abort."""
    brain = Brain(ServerSettings(max_total_tokens=16))
    old, new = submit(brain, "old", 8), submit(brain, "new", 8)
    old.finish()
    new.finish()
    assert (old.meta["num_retractions"], new.meta["num_retractions"]) == (0, 1)
    assert new.request.tokens == expected(brain, 8)
    huge = submit(brain, "huge", 40).finish()
    assert huge.meta["finish_reason"]["status_code"] == 500
    assert brain.idle


def test_in_place_pause_keeps_an_abort_for_later(brain: Brain) -> None:
    """A running request that is aborted during the pause ends after it."""
    reader = submit(brain, count=50)
    brain.step()
    brain.pause("in_place")
    brain.abort("r")
    assert brain.step() == 0
    assert brain.live
    brain.resume()
    reader.finish()
    assert reader.meta["finish_reason"]["type"] == "abort"


def test_abort_pause_settles_when_everything_has_ended(brain: Brain) -> None:
    """The pause is settled only after the step in which the running requests end."""
    submit(brain, count=50)
    brain.step()
    brain.pause("abort")
    before = brain.pause_settled
    brain.step()
    assert (before, brain.pause_settled) == (False, True)
    assert brain.idle


def test_a_request_during_a_pause_is_held_and_its_abort_lost(brain: Brain) -> None:
    """Known but not dispatched: an abort is remembered as sent, and does nothing, then or later."""
    brain.pause("in_place")
    reader = submit(brain, count=3)
    brain.abort("r")
    brain.abort("r")
    brain.step()
    assert not reader.chunks
    brain.resume()
    brain.step()
    brain.abort("r")
    reader.finish()
    assert reader.meta["finish_reason"]["type"] == "length"


def test_disconnect_frees_what_was_held(brain: Brain) -> None:
    """Closing the connection removes a held request and aborts a running one."""
    running = submit(brain, "running", 50)
    brain.step()
    brain.disconnect(running.request)
    brain.step()
    brain.pause("in_place")
    held = submit(brain, "held", 50)
    brain.disconnect(held.request)
    brain.disconnect(held.request)
    assert brain.idle


def test_duplicate_rid(brain: Brain) -> None:
    """The second request with a live rid is refused; the first is untouched."""
    first = submit(brain)
    second = submit(brain).finish()
    assert second.chunks == [
        {
            "error": {
                "message": "Duplicate request ID detected: r",
                "type": "invalid_request_error",
                "code": 400,
                "retryable": False,
            }
        }
    ]
    assert second.done
    assert len(first.finish().request.tokens) == 6


def test_versions_are_exact_and_the_label_lags_one_chunk() -> None:
    """Spans say which weights made each token; the label of a chunk is one chunk late."""
    brain = Brain(ServerSettings(mode="incremental", version_dependent=True))
    reader = submit(brain, count=8)
    for _ in range(3):
        brain.step()
        reader.poll()
    brain.update_weight_version("7", abort_all_requests=False)
    reader.finish()
    labels = [chunk["meta_info"]["weight_version"] for chunk in reader.chunks]
    assert labels == ["default"] * 4 + ["7"] * 4
    assert reader.meta["weight_versions"] == [
        {"version": "default", "start": 0, "end": 3},
        {"version": "7", "start": 3, "end": 8},
    ]
    versions = ["default"] * 3 + ["7"] * 5
    model, request = brain.model, reader.request
    assert (
        model.first_difference(PROMPT, request.tokens, logprobs=request.logprobs, versions=versions) is None
    )
    assert model.first_difference(PROMPT, request.tokens, versions=["default"] * 8) == 3


def test_label_lag_can_be_switched_off() -> None:
    """With ``label_lag=0`` the label is that of the newest token."""
    brain = Brain(ServerSettings(label_lag=0))
    reader = submit(brain)
    brain.step()
    brain.update_weight_version("7", abort_all_requests=False)
    brain.step()
    reader.poll()
    assert reader.meta["weight_version"] == "7"


def test_a_new_label_aborts_everything_by_default(brain: Brain) -> None:
    """``update_weight_version`` ends what runs unless told not to."""
    reader = submit(brain, count=50)
    brain.step()
    assert brain.update_weight_version("8").body["success"] is True
    reader.finish()
    assert reader.meta["finish_reason"]["type"] == "abort"


def test_cached_tokens_tell_a_repeated_prefix() -> None:
    """A resume finds what the first attempt left in the cache, in whole pages; a flush forgets it."""
    brain = Brain(ServerSettings(cache_page=4))
    prompt = list(range(20))
    first = submit(brain, "a", 10, input_ids=prompt).finish()
    assert first.meta["cached_tokens"] == 0
    resumed = submit(brain, "b", 5, input_ids=prompt + first.request.tokens).finish()
    assert resumed.meta["cached_tokens"] == 28
    assert resumed.meta["cached_tokens_details"] == {"device": 28, "host": 0}
    assert brain.flush_cache().status == 200
    assert submit(brain, "c", 2, input_ids=prompt).finish().meta["cached_tokens"] == 0


def test_flush_is_refused_while_something_runs(brain: Brain) -> None:
    """A cache in use cannot be flushed."""
    submit(brain, count=50)
    brain.step()
    assert brain.flush_cache().status == 400


def test_death_cuts_everything_and_revival_remembers_nothing(brain: Brain) -> None:
    """A dead server has cut its streams and refuses; a new one starts empty, with the first label."""
    reader = submit(brain, count=50)
    brain.step()
    brain.update_weight_version("9", abort_all_requests=False)
    brain.kill()
    brain.kill()
    assert reader.finish().mark is Mark.CUT
    assert not reader.done
    with pytest.raises(ServerDead):
        submit(brain)
    assert brain.step() == 0
    assert not brain.busy
    brain.revive()
    assert (brain.idle, brain.weight_version) == (True, "default")
    assert len(submit(brain).finish().request.tokens) == 6


@pytest.mark.parametrize(
    "bad",
    [b"{", b"[]", b'{"rid": 7}', b'{"sampling_params": {"max_tokens": 1}}', b'{"input_ids": ["x"]}'],
)
def test_bad_bodies_are_refused_before_any_stream(brain: Brain, bad: bytes) -> None:
    """A body that breaks the schema raises, and says where."""
    with pytest.raises(BadBody):
        brain.submit(bad)
    assert brain.idle


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": None}, "should be provided"),
        ({"input_ids": [1] * 40_000}, "longer than the model's context length"),
        ({"input_ids": [512]}, "vocab size"),
        ({"sampling_params": {"max_new_tokens": 40_000}}, "You requested a total of 40003 tokens"),
        ({"sampling_params": {"n": 2}}, "n must be 1"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"sampling_params": {"min_new_tokens": 200}}, "min_new_tokens"),
        ({"sampling_params": {"temperature": -0.5}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"stream_interval": 0}}, "stream_interval"),
    ],
)
def test_requests_that_cannot_be_served(brain: Brain, change: dict[str, Any], words: str) -> None:
    """They become an error chunk with the reason, and nothing is left behind."""
    reader = Reader(brain, brain.submit({**body(), **change})).finish()
    assert words in reader.chunks[0]["error"]["message"]
    assert brain.idle


def test_a_budget_nobody_asked_for_is_clamped() -> None:
    """Without ``max_new_tokens`` the default is used, cut to what is left of the context."""
    brain = Brain(ServerSettings(context_length=10))
    reader = submit(brain, sampling={"max_new_tokens": None}).finish()
    assert reader.meta["finish_reason"] == {"type": "length", "length": 6}


def test_options_of_a_request(brain: Brain) -> None:
    """Text prompts, text in logprobs, prompt ids in the answer, and a sampling seed of its own."""
    reader = submit(
        brain,
        input_ids=None,
        text=decode(PROMPT),
        return_text_in_logprobs=True,
        return_prompt_token_ids=True,
        sampling={"sampling_seed": 4},
    ).finish()
    tokens = [sample.token for sample in brain.model.continuation(PROMPT, 6, sampling_seed=4)]
    assert reader.request.tokens == tokens
    assert reader.chunks[-1]["prompt_token_ids"] == PROMPT
    pairs = reader.meta["output_token_logprobs"]
    assert [pair[2] for pair in pairs] == [decode([token]) for token in tokens[-len(pairs) :]]


def test_settings_that_make_no_sense() -> None:
    """A setting out of its range is refused by name."""
    with pytest.raises(ValueError, match="mode must be one of cumulative, incremental"):
        ServerSettings(mode="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_running_requests must be at least 1"):
        ServerSettings(max_running_requests=0)
    with pytest.raises(ValueError, match="tokens_per_second must not be negative"):
        ServerSettings(tokens_per_second=-1)
    with pytest.raises(ValueError, match="eos_probability must lie between 0 and 1"):
        Brain(ServerSettings(eos_probability=2))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 5)),
        st.tuples(st.just("abort"), st.integers(0, 5)),
        st.tuples(st.just("disconnect"), st.integers(0, 5)),
        st.tuples(st.just("poll"), st.integers(0, 5)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("pause"), st.sampled_from(["abort", "in_place", "retract"])),
        st.tuples(st.just("resume"), st.none()),
        st.tuples(st.just("version"), st.integers(0, 3)),
        st.tuples(st.just("kill"), st.none()),
    ),
    max_size=40,
)


class History:
    """A server under random treatment, and what its clients have in hand."""

    def __init__(self, mode: Any, interval: int) -> None:
        self.brain = Brain(
            ServerSettings(
                mode=mode,
                max_running_requests=2,
                stream_interval=interval,
                version_dependent=True,
                keep_history=True,
            )
        )
        self.readers: dict[int, Reader] = {}

    def submit(self, number: int) -> None:
        """A request of its own prompt and length; each number once."""
        if number not in self.readers:
            self.readers[number] = submit(self.brain, f"r{number}", 7 + number, input_ids=[number])

    def abort(self, number: int) -> None:
        """An abort, whether or not such a request is there."""
        self.brain.abort(f"r{number}")

    def disconnect(self, number: int) -> None:
        """The client leaves."""
        if number in self.readers:
            self.brain.disconnect(self.readers[number].request)

    def poll(self, number: int) -> None:
        """The client reads."""
        if number in self.readers:
            self.readers[number].poll()

    def step(self, count: int) -> None:
        """Some steps."""
        for _ in range(count):
            self.brain.step()

    def pause(self, mode: str) -> None:
        """A pause in any mode."""
        self.brain.pause(mode)

    def resume(self, _: None) -> None:
        """The end of it."""
        self.brain.resume()

    def version(self, number: int) -> None:
        """A new label; number 0 also aborts everything."""
        self.brain.update_weight_version(f"v{number}", abort_all_requests=number == 0)

    def kill(self, _: None) -> None:
        """Another process takes the place of this one."""
        self.brain.kill()
        self.brain.revive()


@settings(max_examples=60, deadline=None)
@given(actions=actions, mode=st.sampled_from(["cumulative", "incremental"]), interval=st.integers(1, 3))
def test_any_history_adds_up(actions: list[tuple[str, Any]], mode: str, interval: int) -> None:
    """Whatever is done to it: every token is the model's for its version, and in the end nothing is left."""
    history = History(mode, interval)
    brain = history.brain
    for action, argument in actions:
        getattr(history, action)(argument)
    brain.resume()
    while brain.busy:
        brain.step()
    assert brain.idle
    assert len(brain.history) == len(history.readers)
    for number, reader in history.readers.items():
        reader.poll()
        request = reader.request
        assert not request.live
        spans = request.spans(len(request.tokens), brain.weight_version)
        versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        model = brain.model
        logprobs = request.logprobs
        assert model.first_difference([number], request.tokens, logprobs=logprobs, versions=versions) is None
