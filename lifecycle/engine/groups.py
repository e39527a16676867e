"""Groups on their way through `collect`, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass

from lifecycle.collect import Verdict
from lifecycle.engine.reports import AbortReport
from lifecycle.log.records import (
    GroupCarried,
    GroupDelivered,
    GroupFailed,
    GroupFiltered,
    GroupRecord,
    GroupStale,
)
from lifecycle.rollout import Rollout
from lifecycle.snapshot import Snapshot
from lifecycle.states import Disposition, RolloutState

Members = tuple[Snapshot, ...]

GROUP_RECORDS: dict[Verdict, type[GroupRecord]] = {
    Verdict.DELIVER: GroupDelivered,
    Verdict.SURPLUS: GroupCarried,
    Verdict.FAILED: GroupFailed,
    Verdict.FILTERED: GroupFiltered,
    Verdict.STALE: GroupStale,
}
DISPOSITIONS: dict[Verdict, Disposition] = {
    Verdict.DELIVER: Disposition.DELIVERED,
    Verdict.SURPLUS: Disposition.CARRIED,
    Verdict.FAILED: Disposition.DELIVERED,
    Verdict.FILTERED: Disposition.FILTERED,
    Verdict.STALE: Disposition.STALE,
}


@dataclass(frozen=True, slots=True)
class Batch:
    """What one `collect` came to; a group is a tuple of snapshots in the order of their `index`.

    `groups` are delivered: every member completed, accepted by the filter. `carried` go on in the next call (whole
    surplus groups, delivered first then, and unfinished ones). `failed` have a failed or discarded member,
    `filtered` were refused by the filter, `stale` were too old. `reached` says whether the target was reached.
    `report` tells how the aborts at the stop went.
    """

    groups: tuple[Members, ...]
    carried: tuple[Members, ...]
    failed: tuple[Members, ...]
    filtered: tuple[Members, ...]
    stale: tuple[Members, ...]
    reached: bool
    report: AbortReport | None


@dataclass(slots=True, eq=False)
class LiveGroup:
    """The n rollouts of one prompt, and when they came in (monotonic seconds)."""

    id: str
    members: list[Rollout]
    began: float
    judging: bool = False
    announced: bool = False

    @property
    def states(self) -> list[RolloutState]:
        """The members' states."""
        return [member.state for member in self.members]

    @property
    def resting(self) -> bool:
        """No member will move by itself."""
        return all(member.at_rest for member in self.members)
