"""Decisions about groups: settled, whole, delivered, surplus."""

from __future__ import annotations

import pytest

from lifecycle.collect import Target, Verdict, check_group, is_settled, is_whole
from lifecycle.errors import ConfigurationError
from lifecycle.request import RolloutRequest
from lifecycle.snapshot import Snapshot
from lifecycle.states import RolloutState as R
from tests.support.driving import group, request

WHOLE = [R.COMPLETED, R.COMPLETED]


def test_settled_and_whole() -> None:
    """Settled: all final; whole: all completed."""
    assert is_settled([R.COMPLETED, R.FAILED, R.DISCARDED])
    assert not is_settled([R.COMPLETED, R.ABORTED])
    assert is_whole(WHOLE)
    assert not is_whole([R.COMPLETED, R.FAILED])


def test_a_group_is_checked_as_a_whole() -> None:
    """Its id is that of its members; requests and snapshots may be mixed."""
    members: list[RolloutRequest | Snapshot] = [*group("g", 3)]
    members[1] = Snapshot.from_prefix(group("g", 3)[1], [4])
    assert check_group(members) == "g"
    assert check_group([request("alone")]) == "alone"


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([], "at least one member"),
        ([group("g")[0], group("g")[0]], "member ids must differ"),
        ([group("g")[0], group("h")[1]], "'h/1' belongs to group 'h'"),
        (group("g", 3)[:2], "says group_size 3, but 2 members were given"),
    ],
)
def test_a_group_that_does_not_fit_together_is_refused(members: list[RolloutRequest], problem: str) -> None:
    """Naming the member."""
    with pytest.raises(ConfigurationError, match=problem):
        check_group(members)


def test_the_doors_of_a_settled_group() -> None:
    """Failed before filtered before stale before surplus."""
    target = Target(1)
    assert target.judge([R.COMPLETED, R.FAILED], accepted=True, stale=False) is Verdict.FAILED
    assert target.judge(WHOLE, accepted=False, stale=True) is Verdict.FILTERED
    assert target.judge(WHOLE, accepted=True, stale=True) is Verdict.STALE
    assert not target.stopped
    assert target.judge(WHOLE, accepted=True, stale=False) is Verdict.DELIVER
    assert target.stopped
    assert target.judge(WHOLE, accepted=True, stale=False) is Verdict.SURPLUS
    assert target.judge([R.FAILED], accepted=True, stale=False) is Verdict.FAILED
    assert target.delivered == 1


def test_without_a_target_it_never_stops() -> None:
    """Everything whole is delivered."""
    target = Target(None)
    for _ in range(5):
        assert target.judge(WHOLE, accepted=True, stale=False) is Verdict.DELIVER
    assert not target.stopped


def test_odd_targets() -> None:
    """None wanted: stopped at once; less than none: refused."""
    assert Target(0).stopped
    with pytest.raises(ConfigurationError, match="target must be 0 or more groups, or None, not -3"):
        Target(-3)
