"""What a store of snapshots must do. Implementations are synchronous and are called from one writer thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lifecycle.errors import SnapshotError, SnapshotTooNew
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition


@dataclass(frozen=True, slots=True)
class Claimed:
    """A snapshot that is now ours, with the epoch that every write for it must carry."""

    snapshot: Snapshot
    epoch: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim brought: the snapshots that are ours now, and those that could not be read, as errors."""

    claimed: tuple[Claimed, ...]
    unreadable: tuple[SnapshotError, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One line of a listing: what is known of a stored rollout without decoding its payload."""

    id: str
    state: str
    disposition: str
    tokens: int
    attempt: int
    epoch: int
    owner: str | None
    lease_until: float | None
    updated_at: float


class StoreTooNew(SnapshotTooNew):
    """The whole store was written by a newer version than this."""

    def __init__(self, where: str, found: int, known: int) -> None:
        super().__init__(where, found, known)
        self.args = (
            f"store {where} has schema {found}, this version reads up to {known}; upgrade rollout-lifecycle",
        )


@runtime_checkable
class SnapshotStore(Protocol):
    """Durable snapshots with owner epochs.

    A write carries the epoch that its owner was given; a lower one than the store holds raises Fenced and changes
    nothing. Within an epoch only extensions are accepted: more tokens, or a later state; the same again is a no-op;
    a contradiction (other tokens at the same place) raises SnapshotError. Fewer tokens are accepted only with
    `rollback=True` (a logged `dropped_tokens`). Writes become durable, all or none, at `flush`.
    Trouble of the store itself raises StoreUnavailable and forgets everything since the last `flush`; the caller
    tries all of that again, which is harmless where the writes had become durable after all.

    Epochs come from one counter in the store (`new_epoch`, `claim`), so two processes never hold the same one. A put
    with a higher epoch than is stored begins a new life under an old id, once no living owner's lease holds it; so
    does, in the same epoch, a put with `anew=True` over one that has ended.
    Leases are kept per owner, not per rollout: a write extends its owner's, and renewing costs one row.
    """

    def new_epoch(self) -> int:
        """An epoch above every one handed out before, durably: for the rollouts that a process submits itself."""
        ...

    def put(
        self,
        snapshot: Snapshot,
        epoch: int,
        *,
        owner: str,
        ttl: float,
        rollback: bool = False,
        anew: bool = False,
    ) -> None:
        """Store a whole snapshot; it takes the place of what was stored, tails included.

        `anew`: the rollout was submitted afresh, so one of the same id that has ended is another one, and is replaced.
        """
        ...

    def append(self, tail: Tail, epoch: int) -> None:
        """Store the tokens that a rollout in flight has gained since the last `put` or `append`.

        A tail that overlaps what is stored is compared and cut; one that leaves a gap raises SnapshotError.
        """
        ...

    def load(self, rollout_id: str) -> Snapshot:
        """The stored snapshot with its tails. Raises KeyError, SnapshotCorrupt or SnapshotTooNew."""
        ...

    def pending(self) -> Sequence[StoredRow]:
        """Everything somebody still waits for.

        That is: not final, or completed or failed without a disposition that ends it (delivered, filtered, stale).
        """
        ...

    def rows(self) -> Sequence[StoredRow]:
        """Everything stored."""
        ...

    def claim(
        self, owner: str, ttl: float, *, ids: Sequence[str] | None = None, force: bool = False
    ) -> Claim:
        """Become the owner of everything pending that nobody's lease holds (`force`: also of what a lease holds).

        Every claimed rollout gets a new, higher epoch, durably, before it returns; what was written before is
        flushed first. `ids` restricts the claim. `ttl` is in seconds. An owner's own rollouts are held by its own
        lease like any other's.
        """
        ...

    def renew(self, owner: str, ttl: float) -> int:
        """Extend the owner's lease to `ttl` seconds from now, durably; returns how many pending rollouts it holds."""
        ...

    def release(self, owner: str) -> None:
        """Give up the lease of `owner`, durably, so that others need not wait for its expiry."""
        ...

    def mark(self, rollout_id: str, disposition: Disposition, epoch: int) -> None:
        """Write down what became of a rollout. Raises SnapshotError where it is not stored."""
        ...

    def discard(self, rollout_id: str) -> None:
        """Delete a stored rollout, durably. Raises KeyError."""
        ...

    def flush(self) -> None:
        """Make everything written so far durable."""
        ...

    def close(self) -> None:
        """Flush, release nothing, close."""
        ...
