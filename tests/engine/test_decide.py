"""What follows when a rollout enters `aborted`: one pure function, as a table."""

from __future__ import annotations

from random import Random

import pytest

from lifecycle.engine.decide import Decision, Next, decide
from lifecycle.engine.outage import OUTAGE_REASONS, Outage
from lifecycle.engine.queue import ReadyQueue, priority
from lifecycle.engine.settings import EngineSettings
from lifecycle.policy import OnAbort, Policy
from lifecycle.rollout import Change, Rollout
from lifecycle.states import Reason, RolloutState, Trigger
from lifecycle.testing.backend import tokens
from tests.support.driving import request

POLICY = Policy(max_attempts=3, backoff_initial=1.0, backoff_max=4.0)


def aborted(
    policy: Policy = POLICY, *, shown: bool = False, by_caller: bool = False, fruitless: int = 0
) -> Rollout:
    """A rollout that has just entered `aborted`."""
    one = Rollout(request(), policy=policy)
    one.dispatch("r", 0.0, 0.0)
    if shown:
        one.observe(tokens(1), 0.0, 0.0)
    one.move(Trigger.LOSE, 0.0)
    one.by_caller = by_caller
    one.fruitless = fruitless
    return one


def entering(trigger: Trigger, reason: Reason) -> Change:
    """The change that led there."""
    return Change(trigger, RolloutState.PARTIAL, RolloutState.ABORTED, 0.0, 0, 0, reason=reason)


LOSE, PREEMPT, CONFIRM, ABORT = Trigger.LOSE, Trigger.PREEMPT, Trigger.CONFIRM, Trigger.ABORT


@pytest.mark.parametrize(
    ("trigger", "reason", "about", "expected"),
    [
        # the caller's intent, and closing, win over everything
        (CONFIRM, Reason.REQUESTED, {"by_caller": True}, Decision(Next.REST)),
        (LOSE, Reason.DISCONNECTED, {"by_caller": True}, Decision(Next.REST)),
        (CONFIRM, Reason.WEIGHT_UPDATE, {"by_caller": True}, Decision(Next.REST)),
        (ABORT, Reason.SHUTDOWN, {"closing": True}, Decision(Next.REST)),
        (LOSE, Reason.WEIGHT_UPDATE, {"closing": True}, Decision(Next.REST)),
        # an outage that has lasted too long
        (LOSE, Reason.UNREACHABLE, {"unreachable": True}, Decision(Next.REST)),
        # aborted for a weight update: at once, free of charge
        (CONFIRM, Reason.WEIGHT_UPDATE, {}, Decision(Next.RESTORE, Reason.WEIGHT_UPDATE)),
        (Trigger.EXPIRE, Reason.WEIGHT_UPDATE, {}, Decision(Next.RESTORE, Reason.WEIGHT_UPDATE)),
        (CONFIRM, Reason.WEIGHT_UPDATE, {"unreachable": True}, Decision(Next.RESTORE, Reason.WEIGHT_UPDATE)),
        # retries
        (LOSE, Reason.DISCONNECTED, {}, Decision(Next.RESTORE, Reason.BACKOFF, 1.0)),
        (LOSE, Reason.UNREACHABLE, {}, Decision(Next.RESTORE, Reason.BACKOFF, 1.0)),
        (PREEMPT, Reason.SERVER_ABORT, {}, Decision(Next.RESTORE, Reason.PREEMPTED, 1.0)),
        (
            LOSE,
            Reason.TRUNCATED,
            {"shown": True, "fruitless": 2},
            Decision(Next.RESTORE, Reason.BACKOFF, 2.0),
        ),
        (LOSE, Reason.SERVER_ERROR, {"fruitless": 1}, Decision(Next.RESTORE, Reason.BACKOFF, 2.0)),
        # attempts used up, only for reasons of the request itself
        (LOSE, Reason.SERVER_ERROR, {"fruitless": 2}, Decision(Next.EXHAUST, Reason.ATTEMPTS)),
        (LOSE, Reason.TRUNCATED, {"fruitless": 2}, Decision(Next.EXHAUST, Reason.ATTEMPTS)),
        (CONFIRM, Reason.STALLED, {"fruitless": 2}, Decision(Next.EXHAUST, Reason.ATTEMPTS)),
        (LOSE, Reason.DISCONNECTED, {"fruitless": 2}, Decision(Next.RESTORE, Reason.BACKOFF, 2.0)),
        (PREEMPT, Reason.SERVER_ERROR, {"fruitless": 2}, Decision(Next.RESTORE, Reason.PREEMPTED, 2.0)),
    ],
)
def test_decisions(trigger: Trigger, reason: Reason, about: dict, expected: Decision) -> None:
    """One row per situation."""
    flags = {"closing": about.pop("closing", False), "unreachable": about.pop("unreachable", False)}
    assert decide(aborted(**about), entering(trigger, reason), **flags) == expected


@pytest.mark.parametrize(
    ("on_abort", "by_caller", "reason", "expected"),
    [
        (OnAbort.DISCARD, True, Reason.OVER_SAMPLED, Decision(Next.DISCARD, Reason.OVER_SAMPLED)),
        (OnAbort.DISCARD, False, Reason.WEIGHT_UPDATE, Decision(Next.DISCARD, Reason.WEIGHT_UPDATE)),
        (OnAbort.DISCARD, False, Reason.DISCONNECTED, Decision(Next.RESTORE, Reason.BACKOFF, 1.0)),
        (OnAbort.RESTART, True, Reason.OVER_SAMPLED, Decision(Next.REST)),
        (
            OnAbort.RESTART,
            False,
            Reason.WEIGHT_UPDATE,
            Decision(Next.RESTORE, Reason.WEIGHT_UPDATE, restart=True),
        ),
        (OnAbort.RESTART, False, Reason.DISCONNECTED, Decision(Next.RESTORE, Reason.BACKOFF, 1.0)),
    ],
)
def test_policies_of_aborts(on_abort: OnAbort, by_caller: bool, reason: Reason, expected: Decision) -> None:
    """They speak of aborts that were asked for, not of lost connections."""
    one = aborted(Policy(on_abort=on_abort, backoff_initial=1.0), by_caller=by_caller)
    assert decide(one, entering(Trigger.CONFIRM, reason), closing=False, unreachable=False) == expected


def test_a_closing_engine_discards_nothing_by_itself() -> None:
    """Shutting down is not a caller's abort."""
    one = aborted(Policy(on_abort=OnAbort.DISCARD))
    assert decide(one, entering(CONFIRM, Reason.SHUTDOWN), closing=True, unreachable=False).next is Next.REST
    assert (
        decide(one, entering(CONFIRM, Reason.WEIGHT_UPDATE), closing=True, unreachable=False).next
        is Next.REST
    )


def test_back_off_doubles_up_to_its_bound_and_never_overflows() -> None:
    """Also after a thousand preempts."""
    one = aborted()
    delays = [
        decide(one, entering(PREEMPT, Reason.SERVER_ABORT), closing=False, unreachable=False).delay_s
        for _ in range(5)
    ]
    assert delays == [1.0, 2.0, 4.0, 4.0, 4.0]
    one.preempts = 1000
    assert (
        decide(one, entering(PREEMPT, Reason.SERVER_ABORT), closing=False, unreachable=False).delay_s == 4.0
    )


def test_a_token_starts_the_count_of_preempts_again() -> None:
    """A preempted attempt that brought something costs the least back-off."""
    one = aborted(shown=True)
    one.preempts = 5
    assert (
        decide(one, entering(PREEMPT, Reason.SERVER_ABORT), closing=False, unreachable=False).delay_s == 1.0
    )
    assert one.preempts == 0


# -- the outage ------------------------------------------------------------------------------------------------------


def outage(**settings: float) -> Outage:
    """With a back-off of one second, doubling up to eight, given up after sixty."""
    numbers = {"outage_backoff": 1.0, "outage_backoff_max": 8.0, "unreachable_timeout": 60.0, **settings}
    return Outage(EngineSettings(**numbers), Random(1))


def test_an_outage_blocks_lets_probes_through_and_ends() -> None:
    """The life of one."""
    state = outage()
    assert not state.active
    assert not state.blocks(0.0)
    assert state.accepted(0.0) is None
    delay = state.failed(10.0)
    assert delay is not None
    assert 0.5 <= delay < 1.0
    assert state.blocks(10.0)
    assert state.failed(10.1) is None, "others that were under way say nothing new"
    assert not state.blocks(10.0 + delay)
    state.probing = True
    assert state.blocks(1000.0), "one probe at a time"
    second = state.failed(12.0)
    assert second is not None
    assert 1.0 <= second < 2.0
    assert state.failures == 2
    state.probing = True
    state.probe_ended()
    assert not state.blocks(12.0 + second)
    assert state.accepted(20.0) == 10.0
    assert not state.active
    assert state.failures == 0


def test_the_last_probe_is_made_exactly_when_the_time_is_up() -> None:
    """No back-off reaches beyond it; afterwards they are ordinary again."""
    state = outage(unreachable_timeout=3.0)
    now, moments = 0.0, []
    for _ in range(6):
        delay = state.failed(now)
        assert delay is not None
        now += delay
        moments.append(now)
        state.probing = True
    assert 3.0 in [round(moment, 9) for moment in moments]
    assert not state.expired(2.9)
    assert state.expired(3.0)
    assert moments[-1] > 3.0


def test_failures_do_not_overflow() -> None:
    """However long it lasts."""
    state = outage()
    for step in range(2000):
        state.probing = True
        assert state.failed(float(step)) is not None
    assert {Reason.UNREACHABLE, Reason.UNAVAILABLE, Reason.RATE_LIMITED} == OUTAGE_REASONS


# -- the queue -------------------------------------------------------------------------------------------------------


def queued(name: str, *, attempt: int = 0, carries: int = 0) -> Rollout:
    """A pending rollout."""
    one = Rollout(request(name), policy=Policy(max_carries=2))
    one.attempt, one.carries = attempt, carries
    return one


def test_priorities() -> None:
    """Starved, begun, fresh."""
    assert priority(queued("a", carries=2)) == 0
    assert priority(queued("a", carries=1, attempt=1)) == 1
    prefixed = queued("a")
    prefixed.tokens.append(1)
    assert priority(prefixed) == 1
    assert priority(queued("a", carries=1)) == 2


def test_the_queue_serves_by_priority_then_by_arrival() -> None:
    """And each once."""
    queue = ReadyQueue()
    for one in (
        queued("f1"),
        queued("b1", attempt=1),
        queued("s", carries=2),
        queued("f2"),
        queued("b2", attempt=1),
    ):
        queue.push(one, None)
    assert len(queue) == 5
    order = []
    while (one := queue.pop(0.0)) is not None:
        order.append(one.id)
    assert order == ["s", "b1", "b2", "f1", "f2"]
    assert len(queue) == 0
    assert queue.next_due() is None


def test_waiting_rollouts_come_when_they_are_due() -> None:
    """And tell when that is."""
    queue = ReadyQueue()
    queue.push(queued("late"), 20.0)
    queue.push(queued("early"), 10.0)
    assert queue.waiting == 2
    assert queue.next_due() == 10.0
    assert queue.pop(9.9) is None
    assert queue.pop(10.0) is not None
    assert queue.next_due() == 20.0
    queue.push(queued("now"), None)
    assert queue.next_due() == float("-inf")


def test_dropped_and_pushed_again_counts_as_the_last_push() -> None:
    """Old entries are passed over wherever they lie."""
    queue = ReadyQueue()
    one, two = queued("one"), queued("two")
    queue.push(one, None)
    queue.push(two, 5.0)
    queue.drop(one)
    queue.drop(two)
    queue.drop(queued("never"))
    assert "one" not in queue
    assert queue.next_due() is None
    assert queue.pop(10.0) is None
    queue.push(one, 5.0)
    queue.push(one, None)
    assert "one" in queue
    assert queue.waiting == 0
    assert queue.pop(10.0) is one
    assert queue.pop(10.0) is None
    queue.push(two, 1.0)
    queue.push(two, 2.0)
    assert queue.pop(1.5) is None
    assert queue.pop(2.0) is two
    queue.push(one, None)
    queue.drop(one)
    assert queue.pop(0.0) is None


def test_a_request_that_breaks_every_connection_is_given_up_in_the_end() -> None:
    """A dead worker is nobody's fault; the same break before any token, again and again, may be the request's."""
    one, change = aborted(), entering(Trigger.LOSE, Reason.DISCONNECTED)
    answers = [
        decide(one, change, closing=False, unreachable=False).next for _ in range(4 * POLICY.max_attempts)
    ]
    assert answers == [Next.RESTORE] * (4 * POLICY.max_attempts - 1) + [Next.EXHAUST]
    again, lost = aborted(), entering(Trigger.LOSE, Reason.WORKER_LOST)
    for _ in range(5 * POLICY.max_attempts):
        assert decide(again, lost, closing=False, unreachable=False).next is Next.RESTORE
