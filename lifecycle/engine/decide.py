"""What happens next when a rollout enters `aborted`: one pure function, so that it can be tested as a table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lifecycle.policy import OnAbort
from lifecycle.rollout import Change, Rollout
from lifecycle.states import Reason, Trigger

ATTRIBUTABLE = frozenset({Reason.SERVER_ERROR, Reason.TRUNCATED, Reason.STALLED})
"""Ends without a token that may be this request's own fault, and so count towards `max_attempts`."""

BREAKS_ALLOWED = 4
"""A dead worker is not the request's fault; a connection that breaks before the first token this many times
`max_attempts` in a row is: it may be what kills the workers."""


class Next(StrEnum):
    """What the engine does with a rollout that entered `aborted`."""

    REST = "rest"
    RESTORE = "restore"
    EXHAUST = "exhaust"
    DISCARD = "discard"


@dataclass(frozen=True, slots=True)
class Decision:
    """`delay_s` is the back-off in `pending`, before jitter; `restart` drops the tokens at the restore."""

    next: Next
    reason: Reason | None = None
    delay_s: float = 0.0
    restart: bool = False


def decide(rollout: Rollout, change: Change, *, closing: bool, unreachable: bool) -> Decision:
    """Decide in the same synchronous step as the transition that led here.

    The caller's intent wins over every retry. `unreachable` says that the backend has been out for too long.
    Counts the attempt on the rollout (`fruitless`, `preempts`).
    """
    policy = rollout.policy
    for_update = change.reason is Reason.WEIGHT_UPDATE and not closing
    if policy.on_abort is OnAbort.DISCARD and (rollout.by_caller or for_update):
        return Decision(Next.DISCARD, change.reason)
    if rollout.by_caller or closing:
        return Decision(Next.REST)
    if for_update:
        return Decision(Next.RESTORE, Reason.WEIGHT_UPDATE, restart=policy.on_abort is OnAbort.RESTART)
    return Decision(Next.REST) if unreachable else _retry(rollout, change)


def _retry(rollout: Rollout, change: Change) -> Decision:
    policy = rollout.policy
    fruitless = rollout.attempt_tokens == 0
    if fruitless and change.reason in ATTRIBUTABLE and change.trigger is not Trigger.PREEMPT:
        rollout.fruitless += 1
        if rollout.fruitless >= policy.max_attempts:
            return Decision(Next.EXHAUST, Reason.ATTEMPTS)
    rollout.preempts = rollout.preempts + 1 if fruitless else 0
    if change.reason is Reason.DISCONNECTED and rollout.preempts >= BREAKS_ALLOWED * policy.max_attempts:
        return Decision(Next.EXHAUST, Reason.ATTEMPTS)
    tries = max(rollout.fruitless, rollout.preempts)
    delay = min(policy.backoff_max, policy.backoff_initial * 2.0 ** min(max(0, tries - 1), 30))
    reason = Reason.PREEMPTED if change.trigger is Trigger.PREEMPT else Reason.BACKOFF
    return Decision(Next.RESTORE, reason, delay)
