"""Saving one group of entries: by which epoch, in which order, and what becomes of those that the store refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lifecycle.errors import Fenced, StoreUnavailable
from lifecycle.log import Journal
from lifecycle.stores.backlog import Entry
from lifecycle.stores.protocol import Claim, SnapshotStore

Refuse = Callable[[Entry, Exception], object]


@dataclass(slots=True)
class Tally:
    """What one group held."""

    snapshots: int = 0
    tails: int = 0
    marks: int = 0
    size: int = 0

    def add(self, entry: Entry) -> None:
        """Count one entry."""
        self.snapshots += entry.snapshot is not None
        self.tails += len(entry.tails)
        self.marks += entry.disposition is not None
        self.size += entry.size

    def merge(self, other: Tally) -> None:
        """Count what another group held."""
        self.snapshots += other.snapshots
        self.tails += other.tails
        self.marks += other.marks
        self.size += other.size


class Saver:
    """Everything a writer's thread does with its store. Used by that thread alone.

    Knows the epochs: one for what this process submits itself, fetched at the first save, and those of its claims.
    What was fenced once is not written again, until a claim brings it back under a higher epoch.
    """

    def __init__(self, store: SnapshotStore, owner: str, ttl: float, journal: Journal) -> None:
        self.active = False
        self._store = store
        self._owner = owner
        self._ttl = ttl
        self._journal = journal
        self._session: int | None = None
        self._claimed: dict[str, int] = {}
        self._fenced: dict[str, int] = {}

    def save(self, group: Sequence[Entry], refuse: Refuse) -> Tally:
        """Make a group durable, all or none; entries that are refused for good are handed to `refuse` instead.

        Raises whatever is wrong with the store; then nothing of the group is durable, or all of it, and saving it
        again is right in either case.
        """
        if self._session is None:
            self._session = self._store.new_epoch()
        tally = Tally()
        for entry in group:
            try:
                self._write(entry, tally)
            except StoreUnavailable:
                raise
            except Exception as error:  # noqa: BLE001  one bad record must not hold up the others for ever
                if isinstance(error, Fenced):
                    self._fenced[entry.id] = error.epoch
                refuse(entry, error)
        self._journal.flush()
        self._store.flush()
        self.active = True
        return tally

    def _write(self, entry: Entry, tally: Tally) -> None:
        epoch = entry.epoch or self._claimed.get(entry.id) or self._session or 0
        if epoch <= self._fenced.get(entry.id, -1):
            return
        entry.condense()
        if entry.snapshot is not None:
            self._store.put(
                entry.snapshot,
                epoch,
                owner=self._owner,
                ttl=self._ttl,
                rollback=entry.rollback,
                anew=entry.anew,
            )
        for tail in entry.tails:
            self._store.append(tail, epoch)
        if entry.disposition is not None:
            self._store.mark(entry.id, entry.disposition, epoch)
        tally.add(entry)

    def claim(self, ids: Sequence[str] | None, *, force: bool) -> Claim:
        """Claim for this owner, and remember the epochs."""
        if self.active:
            # What is ours stays ours: without this, a lease of our own that ran out would have us claim from
            # ourselves, and fence the copies that are alive here.
            self.renew()
        claim = self._store.claim(self._owner, self._ttl, ids=ids, force=force)
        self._claimed.update((claimed.snapshot.id, claimed.epoch) for claimed in claim.claimed)
        self.active = True
        return claim

    def renew(self) -> None:
        """Extend this owner's lease."""
        self._store.renew(self._owner, self._ttl)

    def release(self) -> None:
        """Give up this owner's lease, if it ever had one."""
        if self.active:
            self._store.release(self._owner)
