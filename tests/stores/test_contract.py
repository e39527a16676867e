"""Our own stores under the contract that is shipped for everybody's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lifecycle.stores import MemoryStore, SnapshotStore, SqliteStore
from lifecycle.testing.stores import StoreContract
from tests.support.stores import fast_folder


class TestMemoryStore(StoreContract):
    """The store in memory."""

    def make_store(self, clock: Callable[[], float]) -> SnapshotStore:
        """A dict."""
        return MemoryStore(clock=clock)


class TestSqliteStore(StoreContract):
    """The embedded store, in a file of its own; a peer is another connection to that file."""

    def make_store(self, clock: Callable[[], float]) -> SnapshotStore:
        """A new file."""
        self.folder = fast_folder()
        return SqliteStore(Path(self.folder.name) / "snapshots.db", clock=clock)

    def peer(self, store: SnapshotStore) -> SnapshotStore:
        """The same file again."""
        return SqliteStore(store.path, clock=self.clock)

    def teardown_method(self) -> None:
        """Close, and delete the file."""
        super().teardown_method()
        self.folder.cleanup()
