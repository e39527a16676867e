"""What a store of snapshots must do. Implementations are synchronous and are called from one writer thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lifecycle.errors import SnapshotError
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


@runtime_checkable
class SnapshotStore(Protocol):
    """Durable snapshots with owner epochs.

    A write carries the epoch that its owner was given; a lower one than the store holds raises Fenced and changes
    nothing. Within an epoch only extensions are accepted: more tokens, or a later state; the same again is a no-op;
    a contradiction (other tokens at the same place) raises SnapshotError. Fewer tokens are accepted only with
    `rollback=True` (a logged `dropped_tokens`). Writes become durable, all or none, at `flush`.
    Trouble of the store itself raises StoreUnavailable; the caller tries again.
    """

    def put(self, snapshot: Snapshot, epoch: int, *, owner: str, ttl: float, rollback: bool = False) -> None:
        """Store a whole snapshot; it takes the place of what was stored, tails included."""
        ...

    def append(self, tail: Tail, epoch: int) -> None:
        """Store the tokens that a rollout in flight has gained since the last `put` or `append`."""
        ...

    def load(self, rollout_id: str) -> Snapshot:
        """The stored snapshot with its tails. Raises KeyError, SnapshotCorrupt or SnapshotTooNew."""
        ...

    def pending(self) -> Sequence[StoredRow]:
        """Everything not final, or final and without a disposition that ends it (delivered, filtered, stale)."""
        ...

    def rows(self) -> Sequence[StoredRow]:
        """Everything stored."""
        ...

    def claim(
        self, owner: str, ttl: float, *, ids: Sequence[str] | None = None, force: bool = False
    ) -> Claim:
        """Become the owner of everything pending that nobody's lease holds (`force`: also of what a lease holds).

        Raises every claimed rollout's epoch by one, durably, before it returns. `ttl` is in seconds.
        """
        ...

    def renew(self, owner: str, ttl: float) -> int:
        """Extend the owner's leases to `ttl` seconds from now; returns how many it still holds."""
        ...

    def release(self, owner: str) -> None:
        """Give up all leases of `owner`, so that others need not wait for their expiry."""
        ...

    def mark(self, rollout_id: str, disposition: Disposition, epoch: int) -> None:
        """Write down what became of a rollout."""
        ...

    def discard(self, rollout_id: str) -> None:
        """Delete a stored rollout, for good. Raises KeyError."""
        ...

    def flush(self) -> None:
        """Make everything written so far durable."""
        ...

    def close(self) -> None:
        """Flush, release nothing, close."""
        ...
