"""The part of a store that is the same for all: what a write means. Where the bytes go is the subclass's business.

Times are wall-clock seconds. Every public method may be called from any thread; calls are serialised.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock
from typing import Self

from lifecycle.codec import decode_snapshot, decode_tail, encode_snapshot, encode_tail
from lifecycle.errors import Fenced, SnapshotCorrupt, SnapshotError, StoreUnavailable
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition
from lifecycle.stores.protocol import Claim, Claimed, StoredRow
from lifecycle.stores.rules import (
    Head,
    begins_anew,
    head_of,
    head_with,
    holds,
    judge_owner,
    judge_put,
    judge_tail,
    same_prefix,
    sticky,
    verify,
)

Clock = Callable[[], float]


class BaseStore(ABC):
    """The semantics of `SnapshotStore` over a few primitives that a subclass provides.

    A subclass keeps heads, payloads, leases and one counter of epochs. `_writing` opens a write transaction if none
    is open and leaves it open until `_commit`; `_failed` is asked to translate an exception of the driver.
    """

    def __init__(self, clock: Clock = time.time) -> None:
        self._lock = RLock()
        self._clock = clock
        self._renewed: dict[str, float] = {}
        self._unsure: int | None = None
        self._unflushed = False
        self._forgotten: SnapshotError | None = None

    # -- what a subclass provides --------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self) -> None:
        """Open a write transaction unless one is open."""

    @abstractmethod
    def _commit(self) -> None:
        """Make the open transaction durable; nothing to do when none is open."""

    @abstractmethod
    def _rollback(self) -> None:
        """Forget the open transaction; never raises."""

    @abstractmethod
    def _translated(self, error: Exception) -> SnapshotError | None:
        """The StoreUnavailable that an exception of the driver stands for; None for any other exception."""

    @abstractmethod
    def _find(self, rollout_id: str) -> Head | None:
        """The head of a rollout, locked against other writers until the transaction ends."""

    @abstractmethod
    def _read(self, rollout_id: str) -> tuple[Head, list[bytes]] | None:
        """Head and pieces of a rollout, of one moment. Raises SnapshotCorrupt."""

    @abstractmethod
    def _insert(self, head: Head, payload: bytes) -> bool:
        """Add a new rollout; False when another process was quicker."""

    @abstractmethod
    def _replace(self, head: Head, payload: bytes | None) -> None:
        """Write a head, and with a payload put that in the place of all pieces."""

    @abstractmethod
    def _extend(self, head: Head, payload: bytes) -> None:
        """Write a head and add the payload as its last piece."""

    @abstractmethod
    def _delete(self, rollout_id: str) -> bool:
        """Delete head and pieces; False when there were none."""

    @abstractmethod
    def _listing(self, *, pending: bool) -> list[StoredRow]:
        """The rows, ordered by id."""

    @abstractmethod
    def _next_epoch(self) -> int:
        """Raise the store's counter of epochs by one and return it."""

    @abstractmethod
    def _seize(
        self, owner: str, epoch: int, now: float, ids: Sequence[str] | None, *, force: bool
    ) -> list[str]:
        """Give owner and epoch to everything pending that no lease holds; the ids, in order."""

    @abstractmethod
    def _lease(self, owner: str) -> float | None:
        """Until when the owner's lease runs."""

    @abstractmethod
    def _set_lease(self, owner: str, until: float | None) -> None:
        """Write or (None) delete the owner's lease."""

    @abstractmethod
    def _owned(self, owner: str) -> int:
        """How many pending rollouts are the owner's."""

    @abstractmethod
    def _shut(self) -> None:
        """Close what is open."""

    def lease_clock(self) -> float:
        """The time by which leases are measured."""
        return self._clock()

    # -- writing -------------------------------------------------------------------------------------------------

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
        """Store a whole snapshot; it takes the place of what was stored, tails included."""
        payload = _encoded(snapshot)
        new = head_of(snapshot, epoch, owner, self._clock())
        with self._writing():
            head = self._find(snapshot.id)
            if head is None and not self._insert(new, payload):
                head = self._find(snapshot.id)
            if head is not None:
                self._replace(self._judged(head, new, snapshot, rollback=rollback, anew=anew), payload)
            self._keep_lease(owner, ttl)

    def _judged(self, head: Head, new: Head, snapshot: Snapshot, *, rollback: bool, anew: bool) -> Head:
        owner = new.owner or ""
        judge_owner(head, new.epoch, owner, leased=head.owner is not None and self._leased(head.owner))
        if begins_anew(head, new.epoch, anew=anew):
            return new
        judge_put(head, new, rollback=rollback)
        if not rollback and not same_prefix(head, snapshot):
            self._compare(head, snapshot)
        return sticky(head, new)

    def _compare(self, head: Head, snapshot: Snapshot) -> None:
        """The sums differ: look at the values. What cannot be read any more is no reason to refuse what can."""
        try:
            stored = self.load(head.id)
        except SnapshotCorrupt:
            return
        if not stored.agrees_with(snapshot):
            raise SnapshotError(f"rollout {head.id!r}: other tokens or logprobs are stored than these")

    def append(self, tail: Tail, epoch: int) -> None:
        """Store the tokens that a rollout in flight has gained since the last `put` or `append`."""
        payload = encode_tail(tail)
        with self._writing():
            head = self._find(tail.id)
            if head is None:
                raise SnapshotError(f"rollout {tail.id!r} is not stored; a tail needs a snapshot to follow")
            judge_tail(head, tail, epoch)
            if not tail.tokens:
                return
            if tail.start == head.tokens:
                self._extend(head_with(head, tail, epoch, self._clock()), payload)
            else:
                self._append_overlapping(head, tail, epoch)

    def _append_overlapping(self, head: Head, tail: Tail, epoch: int) -> None:
        """A tail of which some tokens are stored already: compare these, store the others."""
        known = head.tokens - tail.start
        if not holds(self.load(head.id), tail):
            raise SnapshotError(f"rollout {head.id!r}: other tokens or logprobs are stored than this tail's")
        if known < len(tail.tokens):
            rest = replace(
                tail, start=head.tokens, tokens=tail.tokens[known:], logprobs=tail.logprobs[known:]
            )
            self._extend(head_with(head, rest, epoch, self._clock()), encode_tail(rest))

    def mark(self, rollout_id: str, disposition: Disposition, epoch: int) -> None:
        """Write down what became of a rollout."""
        with self._writing():
            head = self._find(rollout_id)
            if head is None:
                raise SnapshotError(
                    f"rollout {rollout_id!r} is not stored; it cannot be marked {disposition!s}"
                )
            if epoch < head.epoch:
                raise Fenced(rollout_id, epoch, head.epoch)
            self._replace(replace(head, disposition=str(disposition), updated_at=self._clock()), None)

    def discard(self, rollout_id: str) -> None:
        """Delete a stored rollout, durably. Raises KeyError."""
        with self._writing():
            found = self._delete(rollout_id)
            self._settle()
        if not found:
            raise KeyError(rollout_id)

    def flush(self) -> None:
        """Make everything written so far durable."""
        with self._guarded():
            self._tell_forgotten()
            self._settle()

    def close(self) -> None:
        """Flush, release nothing, close. Closing twice does nothing."""
        with self._guarded():
            try:
                self._settle()
            finally:
                self._shut()

    # -- reading -------------------------------------------------------------------------------------------------

    def load(self, rollout_id: str) -> Snapshot:
        """The stored snapshot with its tails. Raises KeyError, SnapshotCorrupt or SnapshotTooNew."""
        with self._reading():
            found = self._read(rollout_id)
        if found is None:
            raise KeyError(rollout_id)
        return assemble(*found)

    def pending(self) -> Sequence[StoredRow]:
        """Everything somebody still waits for."""
        with self._reading():
            return self._listing(pending=True)

    def rows(self) -> Sequence[StoredRow]:
        """Everything stored."""
        with self._reading():
            return self._listing(pending=False)

    # -- owning --------------------------------------------------------------------------------------------------

    def new_epoch(self) -> int:
        """An epoch above every one that was handed out before, durably."""
        with self._writing():
            epoch = self._next_epoch()
            self._settle()
            return epoch

    def claim(
        self, owner: str, ttl: float, *, ids: Sequence[str] | None = None, force: bool = False
    ) -> Claim:
        """Become the owner of everything pending that nobody's lease holds (`force`: also of what a lease holds)."""
        self.flush()
        with self._writing():
            epoch = self._next_epoch()
            now = self.lease_clock()
            self._set_lease(owner, now + ttl)
            seized = self._seize(owner, epoch, now, ids, force=force)
            claim = self._loaded(seized, epoch)
            # A commit whose answer is lost may have happened. What it gave us would be held by our own lease then,
            # and nobody would ever hear of it: the next claim takes this epoch's rollouts too.
            self._unsure = epoch
            self._settle()
            self._unsure = None
            return claim

    def _loaded(self, ids: Sequence[str], epoch: int) -> Claim:
        claimed: list[Claimed] = []
        unreadable: list[SnapshotError] = []
        for rollout_id in ids:
            try:
                found = self._read(rollout_id)
                if found is None:
                    raise SnapshotCorrupt(rollout_id, "its row cannot be found again")
                claimed.append(Claimed(assemble(*found), epoch))
            except SnapshotError as error:
                unreadable.append(error)
        return Claim(tuple(claimed), tuple(unreadable))

    def renew(self, owner: str, ttl: float) -> int:
        """Extend the owner's leases to `ttl` seconds from now; returns how many pending rollouts are its own."""
        with self._writing():
            self._set_lease(owner, self.lease_clock() + ttl)
            self._renewed[owner] = self._clock()
            held = self._owned(owner)
            self._settle()
            return held

    def release(self, owner: str) -> None:
        """Give up all leases of `owner`, durably."""
        with self._writing():
            self._set_lease(owner, None)
            self._renewed.pop(owner, None)
            self._settle()

    def _leased(self, owner: str) -> bool:
        until = self._lease(owner)
        return until is not None and until > self.lease_clock()

    def _keep_lease(self, owner: str, ttl: float) -> None:
        """Extend the lease along with a write, at most every third of its length."""
        now, last = self._clock(), self._renewed.get(owner)
        if last is None or not last <= now < last + ttl / 3:
            self._set_lease(owner, self.lease_clock() + ttl)
            self._renewed[owner] = now

    # -- guarding ------------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._guarded():
            self._tell_forgotten()
            self._begin()
            self._unflushed = True
            yield

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """One caller at a time; trouble of the driver undoes the open transaction and becomes StoreUnavailable."""
        with self._lock:
            try:
                yield
            except Exception as error:
                translated = self._translated(error)
                if translated is None:
                    raise
                self._forget()
                raise translated from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Like `_guarded`, for a caller who may not be the one whose writes are undone with the transaction."""
        with self._lock:
            unflushed = self._unflushed
            try:
                with self._guarded():
                    yield
            except StoreUnavailable as error:
                if unflushed:
                    self._forgotten = error
                raise

    def _forget(self) -> None:
        self._rollback()
        self._renewed.clear()
        self._unflushed = False
        self._forgotten = None

    def _tell_forgotten(self) -> None:
        """Raise to the writer what undid its writes in somebody else's call."""
        error, self._forgotten = self._forgotten, None
        if error is not None:
            raise error

    def _settle(self) -> None:
        self._commit()
        self._unflushed = False

    def __enter__(self) -> Self:
        """Nothing to do: a store is open from the start."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()


def assemble(head: Head, pieces: Sequence[bytes]) -> Snapshot:
    """The snapshot that a head and its pieces make. Raises SnapshotCorrupt or SnapshotTooNew."""
    if len(pieces) != head.pieces or not pieces:
        raise SnapshotCorrupt(head.id, f"{head.pieces} pieces announced, {len(pieces)} found")
    snapshot = decode_snapshot(pieces[0], head.id)
    for piece in pieces[1:]:
        tail = decode_tail(piece, head.id)
        if tail.id != snapshot.id:
            raise SnapshotCorrupt(head.id, f"one of its tails belongs to rollout {tail.id!r}")
        snapshot = snapshot.extended(tail)
    return verify(head, snapshot)


def _encoded(snapshot: Snapshot) -> bytes:
    if "\0" in snapshot.id:
        raise SnapshotError(f"rollout {snapshot.id!r}: an id with a NUL character cannot be stored")
    try:
        return encode_snapshot(snapshot)
    except (TypeError, ValueError, OverflowError) as error:
        raise SnapshotError(f"rollout {snapshot.id!r} cannot be stored: {error}") from error
