"""What a store may accept: pure decisions over a small head, shared by every implementation.

A head is everything a write has to be judged by without reading the payload. Two running CRC-32 sums, over the token
ids and over the logprobs, tell in one pass whether a new snapshot begins with the tokens that are stored. They decide
only the cheap case: where they differ, the stored snapshot is read and compared value by value (a NaN has many bit
patterns, all of them equal).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from lifecycle.errors import Fenced, SnapshotCorrupt, SnapshotError
from lifecycle.rollout import same_logprob
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import FINAL_STATES, Disposition, RolloutState

ENDING_DISPOSITIONS = frozenset({Disposition.DELIVERED, Disposition.FILTERED, Disposition.STALE})
"""After one of these nobody waits for a final rollout any more."""


@dataclass(frozen=True, slots=True)
class Head:
    """The row of a stored rollout. `pieces` counts payloads: one snapshot and the tails after it."""

    id: str
    state: str
    disposition: str
    tokens: int
    attempt: int
    epoch: int
    owner: str | None
    updated_at: float
    token_crc: int
    logprob_crc: int
    pieces: int

    @property
    def ended(self) -> bool:
        """Nobody waits for it: given up, or final with a disposition that ends it."""
        if self.state == RolloutState.DISCARDED:
            return True
        return self.state in FINAL_STATES and self.disposition in ENDING_DISPOSITIONS


def extend_crc(values: array[Any], crc: int = 0) -> int:
    """The running CRC-32 of `crc` and these values as little-endian bytes."""
    return crc32(memoryview(values).cast("B"), crc) if values else crc


def head_of(snapshot: Snapshot, epoch: int, owner: str | None, now: float) -> Head:
    """The head of a whole snapshot."""
    return Head(
        id=snapshot.id,
        state=str(snapshot.state),
        disposition=str(snapshot.disposition),
        tokens=len(snapshot.tokens),
        attempt=snapshot.attempt,
        epoch=epoch,
        owner=owner,
        updated_at=now,
        token_crc=extend_crc(snapshot.tokens),
        logprob_crc=extend_crc(snapshot.logprobs),
        pieces=1,
    )


def judge_owner(head: Head, epoch: int, owner: str, *, leased: bool) -> None:
    """Raise Fenced unless `owner` may write: with the present epoch, or with a newer one when no lease holds it."""
    foreign = head.owner is not None and head.owner != owner
    if epoch < head.epoch or (foreign and (leased or epoch == head.epoch)):
        raise Fenced(head.id, epoch, head.epoch)


def begins_anew(head: Head, epoch: int, *, anew: bool) -> bool:
    """A new life under an old id: submitted by a later process, or again after the stored one has ended."""
    return epoch > head.epoch or (anew and head.ended)


def judge_put(head: Head, new: Head, *, rollback: bool) -> None:
    """Raise SnapshotError where `new` is no extension of `head`, as far as heads can tell."""
    if head.state in FINAL_STATES and new.state != head.state:
        raise SnapshotError(
            f"rollout {head.id!r} is stored as {head.state!r}, which is final; refused {new.state!r}"
        )
    if rollback:
        return
    if new.attempt < head.attempt:
        raise SnapshotError(
            f"rollout {head.id!r}: attempt {new.attempt} after attempt {head.attempt} was stored"
        )
    if new.tokens < head.tokens:
        raise SnapshotError(
            f"rollout {head.id!r}: {new.tokens} tokens where {head.tokens} are stored; only a rollback may drop tokens"
        )


def same_prefix(head: Head, snapshot: Snapshot) -> bool:
    """Whether the first tokens of `snapshot` have the sums of the stored ones; False needs a closer look."""
    count = head.tokens
    return (
        extend_crc(snapshot.tokens[:count]) == head.token_crc
        and extend_crc(snapshot.logprobs[:count]) == head.logprob_crc
    )


def holds(snapshot: Snapshot, tail: Tail) -> bool:
    """Whether the tokens of `tail` that `snapshot` has too are the same there."""
    end = tail.start + len(tail.tokens)
    tokens, logprobs = snapshot.tokens[tail.start : end], snapshot.logprobs[tail.start : end]
    return tokens == tail.tokens[: len(tokens)] and all(map(same_logprob, logprobs, tail.logprobs))


def sticky(head: Head, new: Head) -> Head:
    """Keep an ending disposition that was marked: a later put of the same life does not undo it."""
    if head.disposition in ENDING_DISPOSITIONS and new.disposition not in ENDING_DISPOSITIONS:
        return replace(new, disposition=head.disposition)
    return new


def judge_tail(head: Head, tail: Tail, epoch: int) -> None:
    """Raise Fenced or SnapshotError where a tail cannot follow what is stored."""
    if epoch < head.epoch:
        raise Fenced(head.id, epoch, head.epoch)
    if tail.attempt < head.attempt:
        raise SnapshotError(
            f"rollout {head.id!r}: a tail of attempt {tail.attempt} after attempt {head.attempt} was stored"
        )
    if tail.start > head.tokens:
        raise SnapshotError(
            f"rollout {head.id!r}: a tail starts at token {tail.start}, only {head.tokens} are stored"
        )
    if head.state in FINAL_STATES and tail.start + len(tail.tokens) > head.tokens:
        raise SnapshotError(
            f"rollout {head.id!r} is stored as {head.state!r}, which is final; refused a tail"
        )


def head_with(head: Head, tail: Tail, epoch: int, now: float) -> Head:
    """The head after a tail that starts exactly where the stored tokens end."""
    return replace(
        head,
        state=str(tail.state),
        tokens=head.tokens + len(tail.tokens),
        attempt=tail.attempt,
        epoch=epoch,
        updated_at=now,
        token_crc=extend_crc(tail.tokens, head.token_crc),
        logprob_crc=extend_crc(tail.logprobs, head.logprob_crc),
        pieces=head.pieces + 1,
    )


def verify(head: Head, snapshot: Snapshot) -> Snapshot:
    """Check what the pieces gave against the head, and take over the disposition. Raises SnapshotCorrupt."""
    if snapshot.id != head.id:
        raise SnapshotCorrupt(head.id, f"its payload belongs to rollout {snapshot.id!r}")
    if len(snapshot.tokens) != head.tokens:
        raise SnapshotCorrupt(head.id, f"{head.tokens} tokens announced, {len(snapshot.tokens)} found")
    if extend_crc(snapshot.tokens) != head.token_crc or extend_crc(snapshot.logprobs) != head.logprob_crc:
        raise SnapshotCorrupt(head.id, "its pieces do not belong together")
    if snapshot.state != head.state or snapshot.attempt != head.attempt:
        raise SnapshotCorrupt(
            head.id,
            f"{head.state!r} in attempt {head.attempt} announced, "
            f"{str(snapshot.state)!r} in attempt {snapshot.attempt} found",
        )
    try:
        disposition = Disposition(head.disposition)
    except ValueError as error:
        raise SnapshotCorrupt(head.id, f"unknown disposition {head.disposition!r}") from error
    return snapshot if disposition is snapshot.disposition else replace(snapshot, disposition=disposition)
