"""The books: places of rollouts, and what became of tokens."""

from __future__ import annotations

import pytest

from lifecycle.events import EndKind, StreamEnd
from lifecycle.ledger import PLACES, Ledger, place_of
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Rollout
from lifecycle.snapshot import Snapshot, revive
from lifecycle.states import FINAL_STATES, Disposition, FinishReason, Reason, RolloutState
from lifecycle.testing.backend import tokens


def rollout(
    state: RolloutState = RolloutState.PENDING, disposition: Disposition = Disposition.NONE
) -> Rollout:
    """One in the given state."""
    one = Rollout(RolloutRequest(id="a", prompt_ids=[1]), state=state)
    one.disposition = disposition
    return one


def finished(count: int) -> Rollout:
    """One that has generated some tokens and finished."""
    one = rollout()
    one.dispatch("0" * 32, 0.0, 0.0)
    one.observe(tokens(*range(count)), 0.0, 0.0)
    one.end(StreamEnd(EndKind.FINISHED, Reason.STOP, finish_reason=FinishReason.STOP), 0.0, 0.0)
    return one


@pytest.mark.parametrize("state", RolloutState)
@pytest.mark.parametrize("disposition", Disposition)
def test_every_rollout_is_in_exactly_one_place(state: RolloutState, disposition: Disposition) -> None:
    """Only a completed one moves with its disposition."""
    place = place_of(rollout(state, disposition))
    assert place in PLACES
    by_state = {
        "pending": "pending",
        "streaming": "in_flight",
        "partial": "in_flight",
        "aborting": "in_flight",
        "aborted": "resumable",
        "failed": "failed",
        "discarded": "discarded",
    }
    if state is RolloutState.COMPLETED:
        ending = disposition in {Disposition.DELIVERED, Disposition.FILTERED, Disposition.STALE}
        assert place == (str(disposition) if ending else "completed")
    else:
        assert place == by_state[state]


def test_tokens_are_held_then_delivered() -> None:
    """Observed ones are somewhere at any time."""
    books, one = Ledger(), finished(3)
    books.entered(rollout())
    books.observed += 3
    assert books.view([one]).tokens["completed"] == 3
    assert books.view([one]).balanced
    one.disposition = Disposition.DELIVERED
    books.retire(one)
    view = books.view([])
    assert view.tokens["delivered"] == 3
    assert view.rollouts["delivered"] == 1
    assert view.wasted == {}
    assert view.balanced
    assert view.as_dict()["difference"] == 0


@pytest.mark.parametrize("disposition", [Disposition.FILTERED, Disposition.STALE])
def test_refused_tokens_are_wasted_by_disposition(disposition: Disposition) -> None:
    """Filtered or stale."""
    books, one = Ledger(), finished(2)
    books.entered(rollout())
    books.observed += 2
    one.disposition = disposition
    books.retire(one)
    assert books.view([]).wasted == {str(disposition): 2}
    assert books.view([]).balanced


def test_failed_tokens_are_wasted_by_reason() -> None:
    """The reason of the rollout counts, not its disposition."""
    books, one = Ledger(), rollout()
    one.dispatch("0" * 32, 0.0, 0.0)
    one.observe(tokens(1, 2), 0.0, 0.0)
    one.end(StreamEnd(EndKind.REJECTED, Reason.REFUSED), 0.0, 0.0)
    books.entered(rollout())
    books.observed += 2
    books.retire(one)
    assert books.view([]).wasted == {"refused": 2}


def test_brought_dropped_and_released_tokens_are_accounted_for() -> None:
    """A prefix comes in, is dropped at a restart, or leaves with its rollout."""
    books = Ledger()
    prefix = Snapshot.from_prefix(RolloutRequest(id="a", prompt_ids=[1]), [5, 6])
    one, two = revive(prefix, now=0.0), revive(prefix, now=0.0)
    books.entered(one)
    books.entered(two)
    assert books.view([one, two]).balanced
    change = one.restore(0.0, Reason.STALE, restart=True)
    books.dropped["stale"] += change.dropped_tokens
    books.release(two)
    view = books.view([one])
    assert (view.brought, view.released, view.dropped) == (4, 1, {"stale": 2})
    assert view.balanced


def test_what_does_not_come_out_even_says_by_how_much() -> None:
    """A token nobody observed, or a rollout nobody submitted."""
    books = Ledger()
    view = books.view([finished(2)])
    assert view.difference == -2
    assert not view.balanced
    books.entered(rollout())
    books.observed += 3
    assert books.view([finished(2)]).difference == 1
    assert Ledger().view([]).balanced
    assert not Ledger().view([rollout()]).balanced
    assert FINAL_STATES
