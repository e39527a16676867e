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
from lifecycle.stores.protocol import Claim, SnapshotStore

T = TypeVar("T")


class InlineWriter:
    """Writes to a store in the caller's own thread, at once; every future it returns is done.

    Epochs, fences and refusals are told as `StoreWriter` tells them. There is no backlog and nothing is tried
    again, so it is for stores in memory (a store asks for it by the attribute `inline = True`).
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
        self._ttl = ttl
        self._journal = journal
        self._on_fenced = on_fenced
        self._on_error = on_error
        self._session: int | None = None
        self._claimed: dict[str, int] = {}
        self._fenced: dict[str, int] = {}
        self._written: Counter[str] = Counter()
        self._counts: Counter[str] = Counter(saved=0, fenced=0, refused=0)

    def put(self, snapshot: Snapshot, epoch: int = 0, *, rollback: bool = False) -> None:
        """Save a whole snapshot; the log lines that led to it are flushed first."""
        self._journal.flush()
        self._write(
            "snapshots",
            snapshot.id,
            epoch,
            lambda own: self.store.put(snapshot, own, owner=self.owner, ttl=self._ttl, rollback=rollback),
        )

    def append(self, tail: Tail, epoch: int = 0) -> None:
        """Save what a rollout in flight has gained."""
        self._journal.flush()
        self._write("tails", tail.id, epoch, lambda own: self.store.append(tail, own))

    def mark(self, rollout_id: str, disposition: Disposition, epoch: int = 0) -> None:
        """Save what became of a rollout."""
        self._write("marks", rollout_id, epoch, lambda own: self.store.mark(rollout_id, disposition, own))

    def _write(self, kind: str, rollout_id: str, epoch: int, write: Callable[[int], None]) -> None:
        if self._session is None:
            self._session = self.store.new_epoch()
        own = epoch or self._claimed.get(rollout_id) or self._session
        if own <= self._fenced.get(rollout_id, -1):
            return
        try:
            write(own)
        except Fenced as error:
            self._counts["fenced"] += 1
            self._fenced[rollout_id] = error.epoch
            self._on_fenced(rollout_id)
        except SnapshotError as error:
            self._counts["refused"] += 1
            self._on_error(rollout_id, error)
        else:
            self._counts["saved"] += 1
            self._written[kind] += 1

    def flush(self) -> Future[None]:
        """Make everything durable and say so in the log."""
        return self.call(self._flush)

    def _flush(self) -> None:
        self.store.flush()
        written, self._written = self._written, Counter()
        if not written:
            return
        identity = self._journal.identity
        self._journal.emit(
            SnapshotSaved(
                ts=time.time(),
                run_id=identity.run_id,
                process_id=identity.process_id,
                step=self._journal.step,
                snapshots=written["snapshots"],
                tails=written["tails"],
                marks=written["marks"],
                bytes=0,
                duration_s=0.0,
                backlog=0,
            )
        )

    def claim(self, *, ids: Sequence[str] | None = None, force: bool = False) -> Future[Claim]:
        """Claim for this owner (see `SnapshotStore.claim`)."""
        return self.call(lambda: self._claim(ids, force=force))

    def _claim(self, ids: Sequence[str] | None, *, force: bool) -> Claim:
        claim = self.store.claim(self.owner, self._ttl, ids=ids, force=force)
        self._claimed.update({claimed.snapshot.id: claimed.epoch for claimed in claim.claimed})
        return claim

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
        """Flush and give up the leases; the store stays open."""
        self.store.flush()
        self.store.release(self.owner)
