"""The interface of `StoreWriter` without its thread: for stores whose writes cost nothing, and for virtual time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from lifecycle.errors import Fenced, SnapshotError
from lifecycle.log import Journal
from lifecycle.log.records import SnapshotSaved
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition
from lifecycle.stores.backlog import Entry, is_fresh
from lifecycle.stores.protocol import Claim, SnapshotStore
from lifecycle.stores.saving import Saver, Tally

T = TypeVar("T")


class InlineWriter:
    """Writes to a store in the caller's own thread, at once; every future it returns is done.

    Epochs, fences and refusals are told as `StoreWriter` tells them. There is no backlog, nothing is tried again and
    no lease is renewed between writes, so it is for stores in memory (a store asks for it by the attribute
    `inline = True`).
    """

    def __init__(
        self,
        store: SnapshotStore,
        *,
        owner: str,
        ttl: float,
        journal: Journal,
        on_fenced: Callable[[str], object],
        on_error: Callable[[str, Exception], object],
    ) -> None:
        self.store = store
        self.owner = owner
        self._journal = journal
        self._on_fenced = on_fenced
        self._on_error = on_error
        self._saver = Saver(store, owner, ttl, journal)
        self._tally = Tally()
        self._counts: Counter[str] = Counter(saved=0, fenced=0, refused=0)

    def put(self, snapshot: Snapshot, epoch: int = 0, *, rollback: bool = False) -> None:
        """Save a whole snapshot; the log lines that led to it are flushed first."""
        anew = is_fresh(snapshot)
        self._save(Entry(snapshot.id, 0, epoch, snapshot=snapshot, rollback=rollback, anew=anew))

    def append(self, tail: Tail, epoch: int = 0) -> None:
        """Save what a rollout in flight has gained."""
        self._save(Entry(tail.id, 0, epoch, tails=[tail]))

    def mark(self, rollout_id: str, disposition: Disposition, epoch: int = 0) -> None:
        """Save what became of a rollout."""
        self._save(Entry(rollout_id, 0, epoch, disposition=disposition))

    def _save(self, entry: Entry) -> None:
        before = self._counts["fenced"] + self._counts["refused"]
        try:
            tally = self._saver.save((entry,), self._refuse)
        except SnapshotError as error:
            self._refuse(entry, error)
            return
        if before == self._counts["fenced"] + self._counts["refused"]:
            self._counts["saved"] += 1
            self._tally.merge(tally)

    def _refuse(self, entry: Entry, error: Exception) -> None:
        if isinstance(error, Fenced):
            self._counts["fenced"] += 1
            self._on_fenced(entry.id)
        else:
            self._counts["refused"] += 1
            self._on_error(entry.id, error)

    def flush(self) -> Future[None]:
        """Everything is durable already; says so in the log."""
        return self.call(self._tell)

    def _tell(self) -> None:
        tally, self._tally = self._tally, Tally()
        if tally == Tally():
            return
        identity = self._journal.identity
        self._journal.emit(
            SnapshotSaved(
                ts=time.time(),
                run_id=identity.run_id,
                process_id=identity.process_id,
                step=self._journal.step,
                snapshots=tally.snapshots,
                tails=tally.tails,
                marks=tally.marks,
                bytes=tally.size,
                duration_s=0.0,
                backlog=0,
            )
        )

    def claim(self, *, ids: Sequence[str] | None = None, force: bool = False) -> Future[Claim]:
        """Claim for this owner (see `SnapshotStore.claim`)."""
        return self.call(lambda: self._saver.claim(ids, force=force))

    def call(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` now; the future holds what it returned or raised."""
        future: Future[T] = Future()
        try:
            future.set_result(job())
        except Exception as error:  # noqa: BLE001  told to whoever waits for the future
            future.set_exception(error)
        return future

    def admit(self) -> None:
        """Always: nothing waits."""

    def stats(self) -> dict[str, Any]:
        """Counters."""
        return {"backlog_operations": 0, "backlog_bytes": 0, "failing_tries": 0, **self._counts}

    def close(self, timeout: float | None = None) -> None:  # noqa: ARG002  nothing to wait for
        """Give up the leases; the store stays open."""
        self._saver.release()
