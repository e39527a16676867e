"""A store and a clock for each test of the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition
from lifecycle.stores.protocol import SnapshotStore, StoredRow
from lifecycle.testing.stores.builders import OWNER, TTL, ManualClock


class StoreTests:
    """The store under test, and short ways to write to it."""

    def make_store(self, clock: Callable[[], float]) -> SnapshotStore:
        """A new, empty store that measures leases by `clock`."""
        raise NotImplementedError

    def peer(self, store: SnapshotStore) -> SnapshotStore:
        """Another connection to the data of `store`, as another process would have; by default the same one."""
        return store

    def setup_method(self) -> None:
        """A store and a clock for each test."""
        self.clock = ManualClock()
        self.store = self.make_store(self.clock)
        self.epoch = self.store.new_epoch()

    def teardown_method(self) -> None:
        """Close the store."""
        self.store.close()

    def put(self, value: Snapshot, *, owner: str = OWNER, epoch: int | None = None, **how: Any) -> None:
        """Write and flush one snapshot."""
        self.store.put(value, self.epoch if epoch is None else epoch, owner=owner, ttl=TTL, **how)
        self.store.flush()

    def append(self, value: Tail, *, epoch: int | None = None) -> None:
        """Write and flush one tail."""
        self.store.append(value, self.epoch if epoch is None else epoch)
        self.store.flush()

    def mark(self, rollout_id: str, disposition: Disposition, *, epoch: int | None = None) -> None:
        """Write and flush one disposition."""
        self.store.mark(rollout_id, disposition, self.epoch if epoch is None else epoch)
        self.store.flush()

    def row(self, rollout_id: str = "r1") -> StoredRow:
        """The listed row of a rollout."""
        return next(row for row in self.store.rows() if row.id == rollout_id)
