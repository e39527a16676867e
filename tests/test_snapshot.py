"""Snapshots as values: made from rollouts and from foreign samples, compared, extended, revived."""

from __future__ import annotations

import math
from array import array

import pytest

from lifecycle.errors import ConfigurationError, SnapshotCorrupt
from lifecycle.events import ChannelData, EndKind, StreamEnd, TokenSlice, VersionSpan
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Rollout
from lifecycle.snapshot import Snapshot, revive, take, take_tail
from lifecycle.states import IN_FLIGHT_STATES, FinishReason, Reason, RolloutState, Trigger
from lifecycle.testing.stores import same, snapshot, tail

REQUEST = RolloutRequest(id="r1", prompt_ids=(1, 2, 3), max_new_tokens=100)


def running(*texts: str | None) -> Rollout:
    """A rollout in flight that got one token, with a text, per given text."""
    rollout = Rollout(REQUEST)
    rollout.dispatch("ab" * 16, 1.0, 1.0)
    for number, text in enumerate(texts):
        rollout.observe(TokenSlice([number], [-0.5], "7", text), 2.0, 2.0)
    return rollout


def test_a_snapshot_is_a_copy() -> None:
    """Tokens that come later do not show in it."""
    rollout = running("a")
    taken = take(rollout, "host-1")
    rollout.observe(TokenSlice([9], [-1.0], "8"), 3.0, 3.0)
    rollout.attempts[0].end = 77
    assert (list(taken.tokens), taken.text, taken.process) == ([0], "a", "host-1")
    assert (taken.attempts[0].end, taken.spans) == (1, (VersionSpan("7", 0, 1, "label"),))


def test_a_snapshot_and_its_tails_are_the_later_snapshot() -> None:
    """Checkpoints lose nothing of tokens, logprobs, versions, text and state."""
    for first in range(5):
        rollout = running(*"abcde"[:first])
        early = take(rollout)
        for number, text in enumerate("fgh"):
            rollout.observe(TokenSlice([number], [math.nan], "8", text), 3.0, 3.0)
        rollout.move(Trigger.ABORT, 4.0)
        later, extended = take(rollout), early.extended(take_tail(rollout, first))
        assert (extended.tokens, extended.text, extended.spans) == (later.tokens, later.text, later.spans)
        assert (extended.state, extended.attempt) == (RolloutState.ABORTING, 1)
        assert extended.agrees_with(later)


def test_a_tail_carries_only_what_is_new() -> None:
    """Neither tokens nor text from before its start are in it."""
    rollout = running("ab", None, "cd", "e")
    end = take_tail(rollout, 1)
    assert (list(end.tokens), end.text, end.text_start) == ([1, 2, 3], "cde", 2)
    assert take_tail(running(None, None), 1).text is None


def test_overlapping_tails_are_cut() -> None:
    """Tokens that are held already are not added twice; nothing new changes nothing."""
    value = snapshot(tokens=4, text="abcd")
    assert list(value.extended(tail(start=2, count=4, text="cdef", text_start=2)).tokens) == list(range(6))
    assert value.extended(tail(start=2, count=4, text="cdef", text_start=2)).text == "abcdef"
    assert value.extended(tail(start=0, count=4)) is value


def test_a_tail_without_text_keeps_the_text() -> None:
    """A server that sends no text leaves what there was."""
    assert snapshot(tokens=4, text="abcd").extended(tail(start=4)).text == "abcd"


def test_a_tail_that_does_not_fit_is_refused() -> None:
    """A gap in the tokens, a gap in the text, or other tokens in the overlap."""
    value = snapshot(tokens=4, text="abcd")
    wrong = tail(start=2, count=3)
    wrong.tokens[0] = 99
    for bad in (tail(start=5), wrong, tail(start=4, text="x", text_start=9)):
        with pytest.raises(SnapshotCorrupt, match="'r1'"):
            value.extended(bad)


def test_snapshots_agree_up_to_the_shorter_one() -> None:
    """Tokens and logprobs count, NaN equals NaN."""
    assert snapshot(tokens=3).agrees_with(snapshot(tokens=9))
    assert snapshot(tokens=9).agrees_with(snapshot(tokens=3))
    assert not snapshot(tokens=3).agrees_with(snapshot(tokens=3, first=1))
    one, other = snapshot(tokens=3), snapshot(tokens=3)
    one.logprobs[1], other.logprobs[1] = math.nan, -math.nan
    assert one.agrees_with(other)
    other.logprobs[1] = -1.0
    assert not one.agrees_with(other)


def test_a_sample_of_a_framework_becomes_a_snapshot() -> None:
    """Tokens, logprobs with gaps, and one version label for all."""
    made = Snapshot.from_prefix(REQUEST, [7, 8], [-0.5, None], "12")
    assert (made.state, made.reason, list(made.tokens)) == (RolloutState.ABORTED, Reason.RESUMED, [7, 8])
    assert math.isnan(made.logprobs[1])
    assert made.weight_versions == [{"version": "12", "start": 0, "end": 2, "source": "given"}]
    assert made.prompt_ids == (1, 2, 3)
    assert not made.final


def test_a_sample_without_logprobs_or_versions() -> None:
    """Unknown stays unknown."""
    made = Snapshot.from_prefix(REQUEST, [7, 8])
    assert all(map(math.isnan, made.logprobs))
    assert made.spans == ()


def test_spans_of_a_framework_are_taken_over() -> None:
    """In order, gaps allowed, marked as given."""
    spans = [VersionSpan("1", 0, 1), VersionSpan("2", 2, 3)]
    made = Snapshot.from_prefix(REQUEST, [7, 8, 9], versions=spans)
    assert made.spans == (VersionSpan("1", 0, 1, "given"), VersionSpan("2", 2, 3, "given"))


def test_an_empty_prefix_is_a_fresh_rollout() -> None:
    """Nothing generated means nothing to resume."""
    made = Snapshot.from_prefix(REQUEST, versions="12")
    assert (made.state, made.reason, made.spans) == (RolloutState.PENDING, None, ())


@pytest.mark.parametrize(
    ("tokens", "how", "problem"),
    [
        ([1, 2], {"logprobs": [-0.5]}, "2 tokens with 1 logprobs"),
        (range(101), {}, "101 tokens exceeds max_new_tokens=100"),
        ([1, 2], {"versions": [VersionSpan("1", 0, 3)]}, r"\[0, 3\) does not fit 2 tokens"),
        ([1, 2], {"versions": [VersionSpan("1", 1, 2), VersionSpan("2", 0, 1)]}, "in order"),
    ],
)
def test_a_prefix_that_cannot_be_true_is_refused(
    tokens: list[int], how: dict[str, object], problem: str
) -> None:
    """The message names the request and the numbers."""
    with pytest.raises(ConfigurationError, match=problem):
        Snapshot.from_prefix(REQUEST, tokens, **how)


def test_the_loss_mask_is_by_weight_version() -> None:
    """Only tokens known to be of the current version count, if one is given."""
    spans = (VersionSpan("1", 0, 2), VersionSpan("2", 3, 4))
    made = Snapshot.from_prefix(REQUEST, [7, 8, 9, 10], versions=spans)
    assert made.loss_mask() == [1, 1, 1, 1]
    assert made.loss_mask("2") == [0, 0, 0, 1]
    assert made.loss_mask("3") == [0, 0, 0, 0]


@pytest.mark.parametrize("state", list(RolloutState))
def test_what_was_in_flight_comes_back_aborted(state: RolloutState) -> None:
    """Its request belongs to another process; the reason is `crash`. Everything else keeps its state and reason."""
    back = revive(snapshot(tokens=3, state=state, reason=Reason.REQUESTED), now=5.0)
    lost = state in IN_FLIGHT_STATES
    assert back.state is (RolloutState.ABORTED if lost else state)
    assert back.reason is (Reason.CRASH if lost else Reason.REQUESTED)


def test_a_revived_rollout_is_what_was_taken() -> None:
    """Taking a snapshot of it gives the same again, apart from the counter of log lines, and nothing is shared."""
    rollout = running("a", "b")
    rollout.keep_channel(ChannelData("experts", b"\x01", 0, complete=True))
    end = StreamEnd(EndKind.FINISHED, Reason.STOP, finish_reason=FinishReason.STOP, matched="</s>")
    rollout.end(end, 3.0, 3.0)
    taken = take(rollout)
    again = take(revive(taken, now=9.0))
    assert same(again, Snapshot(**{**fields(taken), "seq": 0}))
    assert again.tokens is not taken.tokens
    assert again.attempts[0] is not taken.attempts[0]


def test_a_revived_rollout_goes_on() -> None:
    """Its next attempt starts after the tokens held, and a tail of it begins there."""
    back = revive(snapshot(tokens=3, text="abc", state=RolloutState.PARTIAL), now=5.0)
    back.restore(6.0, Reason.RESUMED)
    back.dispatch("cd" * 16, 7.0, 7.0)
    assert back.call().input_ids == [1, 2, 3, 0, 1, 2]
    back.observe(TokenSlice([9], [-0.5], None, "d"), 8.0, 8.0)
    end = take_tail(back, 3)
    assert (list(end.tokens), end.text, end.text_start, end.attempt) == ([9], "d", 3, 2)


def fields(value: Snapshot) -> dict[str, object]:
    """A snapshot's fields by name."""
    return {name: getattr(value, name) for name in Snapshot.__dataclass_fields__}


def test_prompt_ids_of_the_request_need_not_be_repeated() -> None:
    """A snapshot of a request with prompt ids has them; one of a text prompt has none until it is tokenised."""
    assert Snapshot(request=REQUEST).prompt_ids == (1, 2, 3)
    assert Snapshot(request=RolloutRequest(text="x")).prompt_ids is None
    assert Snapshot(request=RolloutRequest(text="x"), prompt_ids=(5,), tokens=array("i")).prompt_ids == (5,)
