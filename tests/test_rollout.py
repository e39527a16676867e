"""The live record: tokens, spans, attempts, and what it costs."""

from __future__ import annotations

import math
import sys
import tracemalloc
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.errors import ConfigurationError, IllegalTransition, StreamMalformed
from lifecycle.events import ChannelData, EndKind, StreamEnd, TokenSlice, VersionSpan, token_slice
from lifecycle.policy import Policy
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Rollout, same_logprob
from lifecycle.states import FinishReason, Outcome, Reason, RolloutState, Trigger, VersionSource
from lifecycle.testing.backend import finish, lost, tokens

ABORTED = StreamEnd(EndKind.ENDED, Reason.SERVER_ABORT, "Aborted")


def fresh(budget: int = 100, **fields: Any) -> Rollout:
    """A pending rollout with a prompt of three."""
    return Rollout(RolloutRequest(id="a", prompt_ids=[1, 2, 3], max_new_tokens=budget, **fields), now=1.0)


def flying(*pieces: TokenSlice, budget: int = 100) -> Rollout:
    """One in flight that has shown these."""
    one = fresh(budget)
    one.dispatch("r1", 2.0, 100.0)
    for piece in pieces:
        one.observe(piece, 3.0, 101.0)
    return one


def ended(kind: EndKind = EndKind.FINISHED, *spans: VersionSpan) -> StreamEnd:
    """An end with spans."""
    return StreamEnd(kind, Reason.STOP, finish_reason=FinishReason.STOP, spans=spans)


def test_dispatch_begins_an_attempt() -> None:
    """A fresh rid, the attempt counted, the call ready to send."""
    one = fresh(
        10, sampling_params={"temperature": 0.5, "min_new_tokens": 4}, routing_key="k", extra={"priority": 1}
    )
    with pytest.raises(ConfigurationError, match="not dispatched"):
        one.call()
    change = one.dispatch("r1", 3.0, 100.0)
    assert (change.source, change.dest, change.dwell_s) == (RolloutState.PENDING, RolloutState.STREAMING, 2.0)
    call = one.call()
    assert (call.rid, call.rollout_id, call.attempt) == ("r1", "a", 1)
    assert call.input_ids == [1, 2, 3]
    assert call.sampling_params == {"temperature": 0.5, "min_new_tokens": 4, "max_new_tokens": 10}
    assert (call.routing_key, call.extra) == ("k", {"priority": 1})
    assert call.ref.rid == "r1"
    assert one.in_flight
    assert not one.at_rest


def test_a_text_prompt_without_ids_cannot_be_called() -> None:
    """The engine tokenises first."""
    one = Rollout(RolloutRequest(text="x"))
    one.dispatch("r", 0.0, 0.0)
    with pytest.raises(ConfigurationError, match="no ids yet"):
        one.call()


def test_observe_appends_and_says_only_the_first_time() -> None:
    """Streaming → partial is a change; more tokens are not."""
    one = flying()
    change = one.observe(tokens(7, 8), 4.0, 102.0)
    assert change is not None
    assert (change.trigger, change.dest, change.tokens, change.new_tokens) == ("observe", "partial", 2, 2)
    assert change.dwell_s == 2.0
    seq = one.seq
    assert one.observe(tokens(9), 5.0, 103.0) is None
    assert one.seq == seq
    assert list(one.tokens) == [7, 8, 9]
    assert list(one.logprobs) == [-0.5] * 3
    assert one.attempt_tokens == 3
    assert one.budget == 97
    assert one.attempts[0].first_token_at == 102.0


def test_null_logprobs_are_nan() -> None:
    """And compare as equal."""
    one = flying(token_slice([(None, 1), (-1.0, 2)]))
    assert math.isnan(one.logprobs[0])
    assert same_logprob(one.logprobs[0], math.nan)
    assert same_logprob(-1.0, -1.0)
    assert not same_logprob(-1.0, math.nan)
    assert not same_logprob(-1.0, -2.0)


@pytest.mark.parametrize(
    ("piece", "problem"),
    [
        (TokenSlice([], []), "0 tokens with 0 logprobs"),
        (TokenSlice([1, 2], [-1.0]), "2 tokens with 1 logprobs"),
        (TokenSlice([1, 2, 3], [-1.0] * 3), "3 more tokens where the budget leaves 2"),
    ],
)
def test_a_refused_slice_changes_nothing(piece: TokenSlice, problem: str) -> None:
    """Validated first, committed second."""
    one = flying(tokens(5), budget=3)
    before = vars_of(one)
    with pytest.raises(StreamMalformed, match=problem):
        one.observe(piece, 9.0, 109.0)
    assert vars_of(one) == before


def vars_of(one: Rollout) -> dict[str, Any]:
    """Everything in the record, as it can be compared."""
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: repr(getattr(one, name)) for name in slots}


def test_a_slice_where_nothing_is_in_flight_is_refused() -> None:
    """IllegalTransition names the rollout, and nothing changes."""
    one = fresh()
    before = vars_of(one)
    with pytest.raises(IllegalTransition, match="rollout 'a': 'observe' is not possible in state 'pending'"):
        one.observe(tokens(1), 0.0, 0.0)
    assert vars_of(one) == before


def test_a_resume_goes_on_behind_what_is_held() -> None:
    """Tokens survive the end, the restore, and the next attempt; the budget shrinks."""
    one = flying(tokens(7, 8), budget=5)
    one.end(lost(), 4.0, 104.0)
    assert one.restore(5.0, Reason.BACKOFF).dropped_tokens == 0
    one.dispatch("r2", 6.0, 106.0)
    call = one.call()
    assert call.input_ids == [1, 2, 3, 7, 8]
    assert call.sampling_params["max_new_tokens"] == 3
    assert call.attempt == 2
    one.observe(tokens(9), 7.0, 107.0)
    assert one.attempt_tokens == 1
    assert [(a.start, a.end, a.rid, a.trigger) for a in one.attempts] == [
        (0, 2, "r1", "lose"),
        (2, 3, "r2", None),
    ]


def test_tokens_fall_only_at_a_restart_and_are_counted() -> None:
    """Everything that hangs on them goes too."""
    one = flying(token_slice([(-1.0, 4)], "1"), TokenSlice([5], [-1.0], "1", "text"))
    one.keep_channel(ChannelData("experts", b"x", 0, complete=True))
    one.end(lost(), 4.0, 104.0)
    assert len(one.tokens) == 2
    change = one.restore(5.0, Reason.STALE, restart=True)
    assert (change.dropped_tokens, change.tokens) == (2, 0)
    assert (len(one.tokens), len(one.logprobs), one.spans, one.texts, one.channels) == (0, 0, (), [], {})
    assert one.text is None
    assert one.attempt == 1


@pytest.mark.parametrize(
    ("held", "params", "why"),
    [
        ([], {}, None),
        ([4], {}, None),
        ([4, 9], {}, FinishReason.STOP),
        ([9, 4], {}, None),
        ([4, 8], {"stop_token_ids": [8]}, FinishReason.STOP),
        ([4, 9], {"ignore_eos": True}, None),
        ([4, 9], {"min_new_tokens": 3}, None),
        ([4, 9], {"min_new_tokens": None, "stop_token_ids": None}, FinishReason.STOP),
        ([4] * 5, {}, FinishReason.LENGTH),
        ([4] * 4 + [9], {}, FinishReason.LENGTH),
    ],
)
def test_a_prefix_that_has_ended_needs_no_further_attempt(
    held: list[int], params: dict[str, Any], why: FinishReason | None
) -> None:
    """An abort may overtake the end: what ends in a stop token, or fills the budget, is complete."""
    request = RolloutRequest(prompt_ids=[1], max_new_tokens=5, sampling_params=params)
    one = Rollout(request, policy=Policy(eos_token_ids=frozenset({9})))
    one.tokens.extend(held)
    assert one.nothing_left is why


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "asked", "trigger", "state", "outcome"),
    [
        (EndKind.FINISHED, False, "finish", "completed", None),
        (EndKind.FINISHED, True, "finish", "completed", Outcome.FINISHED),
        (EndKind.ENDED, False, "preempt", "aborted", None),
        (EndKind.ENDED, True, "confirm", "aborted", Outcome.CONFIRMED),
        (EndKind.REFUSED, False, "reject", "failed", None),
        (EndKind.REFUSED, True, "confirm", "aborted", Outcome.CONFIRMED),
        (EndKind.LOST, False, "lose", "aborted", None),
        (EndKind.LOST, True, "lose", "aborted", Outcome.LOST),
        (EndKind.REJECTED, False, "reject", "failed", None),
        (EndKind.REJECTED, True, "reject", "failed", Outcome.REJECTED),
    ],
)
def test_every_end_asked_for_or_not(
    kind: EndKind, asked: bool, trigger: str, state: str, outcome: Outcome | None
) -> None:
    """The trigger, the state and the outcome of §6.4; the reason of an answered abort is ours."""
    one = flying(tokens(1))
    if asked:
        one.abort_reason = Reason.OVER_SAMPLED
        one.move(Trigger.ABORT, 4.0, reason=Reason.OVER_SAMPLED)
    change, anomaly = one.end(StreamEnd(kind, Reason.SERVER_ERROR, "words", meta={"worker": "w"}), 5.0, 105.0)
    assert anomaly is None
    assert (change.trigger, change.dest, change.outcome) == (trigger, state, outcome)
    ours = asked and trigger in {"confirm", "lose"}
    assert change.reason is (Reason.OVER_SAMPLED if ours else Reason.SERVER_ERROR)
    assert change.detail == one.detail == "words"
    attempt = one.attempts[-1]
    assert (attempt.trigger, attempt.ended_at, attempt.worker) == (trigger, 105.0, "w")
    assert attempt.outcome == (None if outcome is None else str(outcome))
    assert one.outcome is outcome


def test_expiry_says_why_the_stream_was_closed() -> None:
    """The reason is the asker's, the detail that nobody answered."""
    one = flying(tokens(1))
    one.abort_reason = Reason.WEIGHT_UPDATE
    one.move(Trigger.ABORT, 4.0)
    change = one.expire(Reason.ABORT_DEADLINE, 5.0, 105.0)
    assert (change.reason, change.detail, change.outcome) == (
        Reason.WEIGHT_UPDATE,
        "abort_deadline",
        Outcome.EXPIRED,
    )
    other = flying()
    other.move(Trigger.ABORT, 4.0)
    assert other.expire(Reason.ABORT_REFUSED, 5.0, 105.0).reason is Reason.ABORT_REFUSED


def test_a_finish_keeps_what_matched() -> None:
    """Only a finish does."""
    one = flying(tokens(1))
    end = StreamEnd(EndKind.FINISHED, Reason.STOP, finish_reason=FinishReason.STOP, matched="END")
    one.end(end, 1.0, 1.0)
    assert (one.finish_reason, one.matched) == (FinishReason.STOP, "END")


def test_the_outcome_of_an_abort_does_not_outlive_its_attempt() -> None:
    """A restore and a dispatch begin with none."""
    one = flying(tokens(1))
    one.move(Trigger.ABORT, 4.0)
    one.end(ABORTED, 5.0, 5.0)
    assert one.outcome is Outcome.CONFIRMED
    one.restore(6.0, Reason.BACKOFF)
    assert one.outcome is None


def test_fruitless_attempts_are_forgotten_at_the_first_token() -> None:
    """Of any later attempt."""
    one = flying()
    one.fruitless = one.preempts = 3
    one.observe(tokens(1), 1.0, 1.0)
    assert (one.fruitless, one.preempts) == (0, 0)


def test_a_no_op_keeps_reason_and_time() -> None:
    """A late abort is counted as a line and changes nothing else."""
    one = flying(tokens(1))
    one.end(finish(), 5.0, 5.0)
    change = one.move(Trigger.ABORT, 9.0, reason=Reason.REQUESTED)
    assert change.source is change.dest is RolloutState.COMPLETED
    assert one.reason is Reason.STOP
    assert one.entered_at == 5.0
    assert change.dwell_s == 4.0


# -- weight versions -------------------------------------------------------------------------------------------------


def span(version: str, start: int, end: int, source: str = "label") -> VersionSpan:
    """Short for a span."""
    return VersionSpan(version, start, end, source)


def test_labels_become_spans_and_equal_neighbours_are_one() -> None:
    """A token without a label is in no span."""
    one = flying(
        tokens(1, version="1"), tokens(2, version="1"), tokens(3, version="2"), tokens(4, version=None)
    )
    assert one.spans == (span("1", 0, 2), span("2", 2, 3))
    assert one.version is None
    one.observe(tokens(5, version="2"), 1.0, 1.0)
    assert one.spans[-1] == span("2", 4, 5)
    assert one.version == "2"
    assert fresh().version is None


def test_exact_spans_replace_the_labels_of_this_attempt_only() -> None:
    """Earlier attempts keep theirs."""
    one = flying(tokens(1, 2, version="1"))
    one.end(lost(), 1.0, 1.0)
    one.restore(1.0, Reason.BACKOFF)
    one.dispatch("r2", 1.0, 1.0)
    one.observe(tokens(3, 4, 5, version="1"), 1.0, 1.0)
    assert one.spans == (span("1", 0, 5),)
    _, anomaly = one.end(ended(EndKind.FINISHED, span("1", 0, 1), span("2", 1, 3)), 1.0, 1.0)
    assert anomaly is None
    assert one.spans == (span("1", 0, 2), span("1", 2, 3, "span"), span("2", 3, 5, "span"))


@pytest.mark.parametrize(
    "spans",
    [
        (span("2", 0, 1),),
        (span("2", 0, 3),),
        (span("2", 1, 2),),
        (span("2", 0, 1), span("3", 0, 2)),
        (span("2", 0, 2), span("3", 2, 1)),
    ],
)
def test_spans_that_do_not_cover_exactly_are_an_anomaly(spans: tuple[VersionSpan, ...]) -> None:
    """The labels stay, and the spans are told."""
    one = flying(tokens(1, 2, version="1"))
    _, anomaly = one.end(ended(EndKind.FINISHED, *spans), 1.0, 1.0)
    assert anomaly is not None
    assert anomaly.kind == "versions_do_not_fit"
    assert "2:[" in anomaly.detail
    assert "for 2 tokens; labels kept" in anomaly.detail
    assert one.spans == (span("1", 0, 2),)


def test_no_spans_and_empty_spans() -> None:
    """None at all leave the labels; an empty one among others is passed over."""
    one = flying(tokens(1, version="1"))
    assert one.end(ended(), 1.0, 1.0)[1] is None
    assert one.spans == (span("1", 0, 1),)
    two = flying(tokens(1, version="1"))
    two.end(ended(EndKind.FINISHED, span("2", 0, 0), span("3", 0, 1)), 1.0, 1.0)
    assert two.spans == (span("3", 0, 1, "span"),)


def test_given_spans_are_cut_where_an_attempt_begins() -> None:
    """A span from a snapshot never reaches into what a server says."""
    one = fresh()
    one.tokens.extend([1, 2])
    one.logprobs.extend([0.0, 0.0])
    one.set_spans([span("old", 0, 9, VersionSource.GIVEN)])
    one.dispatch("r", 1.0, 1.0)
    one.observe(tokens(3), 1.0, 1.0)
    one.end(ended(EndKind.FINISHED, span("new", 0, 1)), 1.0, 1.0)
    assert one.spans == (span("old", 0, 2, "given"), span("new", 2, 3, "span"))


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["1", "2", None])), min_size=1, max_size=12))
def test_spans_always_lie_in_order_within_the_tokens(pieces: list[tuple[int, str | None]]) -> None:
    """Whatever labels come: spans are disjoint, ascending, and cover exactly the labelled tokens."""
    one, expected = flying(budget=100), []
    for count, version in pieces:
        one.observe(tokens(*range(count), version=version), 1.0, 1.0)
        expected += [version] * count
    told: list[str | None] = [None] * len(one.tokens)
    position = 0
    for each in one.spans:
        assert position <= each.start < each.end <= len(one.tokens)
        told[each.start : each.end] = [each.version] * (each.end - each.start)
        position = each.end
    assert told == expected


# -- channels and text -----------------------------------------------------------------------------------------------


def test_channels_are_placed_behind_what_earlier_attempts_held() -> None:
    """Pieces carry their place in the whole rollout; complete only while all were."""
    one = flying(tokens(1, 2))
    one.keep_channel(ChannelData("experts", b"a", 0, complete=True))
    one.end(lost(), 1.0, 1.0)
    one.restore(1.0, Reason.BACKOFF)
    one.dispatch("r2", 1.0, 1.0)
    one.observe(tokens(3), 1.0, 1.0)
    one.keep_channel(ChannelData("experts", b"b", 0, complete=True))
    assert one.channels["experts"].pieces == [(0, b"a"), (2, b"b")]
    assert one.channels["experts"].complete
    one.keep_channel(ChannelData("experts", b"c", 1, complete=False))
    one.keep_channel(ChannelData("experts", b"d", 2, complete=True))
    assert not one.channels["experts"].complete


def test_text_is_joined_while_every_piece_came() -> None:
    """A piece that is missing makes the whole untrustworthy: None."""
    one = flying(TokenSlice([1], [-1.0], None, "he"), TokenSlice([2, 3], [-1.0] * 2, None, "llo"))
    assert one.text == "hello"
    assert list(one.text_ends) == [1, 3]
    one.observe(TokenSlice([4], [-1.0], None, ""), 1.0, 1.0)
    assert one.text == "hello"
    one.observe(TokenSlice([5], [-1.0], None, None), 1.0, 1.0)
    assert one.text is None


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_a_token_costs_at_most_sixteen_bytes() -> None:
    """Twelve of payload, and what arrays keep in reserve."""
    one = flying(budget=200_000)
    piece = TokenSlice(array("i", range(16)), array("d", [-0.5] * 16), "1")
    before = held(one)
    for _ in range(10_000):
        one.observe(piece, 1.0, 1.0)
    assert len(one.tokens) == 160_000
    assert (held(one) - before) / len(one.tokens) <= 16


def held(one: Rollout) -> int:
    """Bytes of everything that grows with tokens."""
    parts = (one.tokens, one.logprobs, one.texts, one.text_ends, one._spans, one.attempts)
    return sum(map(sys.getsizeof, parts)) + sum(sys.getsizeof(part) for part in one._spans)


def test_an_idle_rollout_costs_at_most_three_kilobytes() -> None:
    """Record and request together, without the prompt's own ids."""
    prompt = (1, 2, 3)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = [
            Rollout(RolloutRequest(id=f"r{number}", prompt_ids=prompt, sampling_params={"temperature": 1.0}))
            for number in range(500)
        ]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(kept) <= 3000


def test_a_policy_is_shared_not_copied() -> None:
    """One object for all rollouts of an engine."""
    policy = Policy()
    assert Rollout(RolloutRequest(prompt_ids=[1]), policy=policy).policy is policy
