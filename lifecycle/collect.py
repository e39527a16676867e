"""Decisions about groups, without waiting for anything: who is settled, who counts, when to stop.

A group is the n samples of one prompt. Invariant: a group that came in leaves through exactly one door: delivered,
failed, filtered, stale or carried; a carried one comes in again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lifecycle.errors import ConfigurationError
from lifecycle.request import RolloutRequest
from lifecycle.snapshot import Snapshot
from lifecycle.states import FINAL_STATES, RolloutState


class Verdict(StrEnum):
    """Through which door a settled group leaves."""

    DELIVER = "deliver"
    SURPLUS = "surplus"  # complete, and the target is reached: carried, delivered first next time
    FAILED = "failed"
    FILTERED = "filtered"
    STALE = "stale"


def is_settled(states: Sequence[RolloutState]) -> bool:
    """Every member is final."""
    return all(state in FINAL_STATES for state in states)


def is_whole(states: Sequence[RolloutState]) -> bool:
    """Every member is completed: the only kind that may be delivered."""
    return all(state is RolloutState.COMPLETED for state in states)


def check_group(members: Sequence[RolloutRequest | Snapshot]) -> str:
    """The id that all members share. Raises ConfigurationError naming what does not fit together."""
    if not members:
        raise ConfigurationError("a group must have at least one member")
    requests = [member.request if isinstance(member, Snapshot) else member for member in members]
    group = requests[0].group
    ids = [request.id for request in requests]
    if len(set(ids)) != len(ids):
        raise ConfigurationError(f"group {group!r}: member ids must differ, got {ids}")
    for request in requests:
        if request.group != group:
            raise ConfigurationError(
                f"group {group!r}: member {request.id!r} belongs to group {request.group!r}"
            )
        if request.group_size != len(requests):
            raise ConfigurationError(
                f"group {group!r}: member {request.id!r} says group_size {request.group_size}, "
                f"but {len(requests)} members were given"
            )
    return group


@dataclass(slots=True)
class Target:
    """Counts deliveries and takes the stop decision, once."""

    wanted: int | None
    delivered: int = 0
    stopped: bool = field(default=False)

    def __post_init__(self) -> None:
        """Refuse a target that is none, and stop at once where nothing is wanted."""
        if self.wanted is not None and self.wanted < 0:
            raise ConfigurationError(f"target must be 0 or more groups, or None, not {self.wanted}")
        self.stopped = self.wanted == 0

    def judge(self, states: Sequence[RolloutState], *, accepted: bool, stale: bool) -> Verdict:
        """The door for a settled group; the delivery that reaches the target is the stop decision."""
        if not is_whole(states):
            return Verdict.FAILED
        if not accepted:
            return Verdict.FILTERED
        if stale:
            return Verdict.STALE
        if self.stopped:
            return Verdict.SURPLUS
        self.delivered += 1
        self.stopped = self.wanted is not None and self.delivered >= self.wanted
        return Verdict.DELIVER
