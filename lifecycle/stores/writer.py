"""The thread between an event loop and a store: takes everything at once, saves it in groups, tells what went wrong.

Nothing here blocks its caller. What waits is merged per rollout, so that a store that stands still costs memory for
the rollouts that are alive and no more; new ones are refused by `admit` once the backlog is over its bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any, TypeVar

from lifecycle.errors import Fenced, SnapshotError, StoreUnavailable
from lifecycle.log import Journal, Record
from lifecycle.log.journal import shorten
from lifecycle.log.records import SnapshotFailed, SnapshotSaved
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition
from lifecycle.stores.backlog import Backlog, Entry
from lifecycle.stores.protocol import Claim, SnapshotStore
from lifecycle.stores.saving import Saver, Tally
from lifecycle.stores.settings import DEFAULT_SETTINGS, SystemClock, WriterClock, WriterSettings

__all__ = ["StoreWriter", "WriterSettings"]

T = TypeVar("T")


def _ignore(*_: object) -> None:
    """Nobody asked to be told."""


class StoreWriter:
    """One writer thread over one store, for one owner.

    `put`, `append` and `mark` may be called from any thread and return at once. An `epoch` of 0 means the one by
    which this writer owns the rollout: from its last `claim`, or for a new one its own. `on_fenced(rollout_id)` is
    called in the writer's thread when another owner has taken a rollout over; nothing more is written for it.
    `on_error(rollout_id, error)` likewise for a record that the store refuses for good. Log lines emitted before a
    `put` are in the log file before that snapshot is durable.
    """

    def __init__(
        self,
        store: SnapshotStore,
        *,
        owner: str,
        journal: Journal | None = None,
        settings: WriterSettings = DEFAULT_SETTINGS,
        on_fenced: Callable[[str], object] = _ignore,
        on_error: Callable[[str, Exception], object] = _ignore,
        clock: WriterClock | None = None,
    ) -> None:
        self.store = store
        self.owner = owner
        self.settings = settings
        self._journal = journal or Journal(None)
        self._on_fenced = on_fenced
        self._on_error = on_error
        self._clock = clock or SystemClock()
        self._condition = Condition()
        self._backlog = Backlog()
        self._group: list[Entry] = []
        self._group_bytes = 0
        self._saver = Saver(store, owner, settings.ttl, self._journal)
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._flushes: deque[tuple[int, Future[None]]] = deque()
        self._first_at: float | None = None
        self._retry_at: float | None = None
        self._renew_at: float | None = None
        self._tries = 0
        self._closing = False
        self._stopped: StoreUnavailable | None = None
        self._counts = {"saved": 0, "groups": 0, "failures": 0, "fenced": 0, "refused": 0}
        self._last_error: str | None = None
        self._thread = Thread(target=self._main, name=f"lifecycle-store-{owner}", daemon=True)
        self._thread.start()

    # -- called by the engine ------------------------------------------------------------------------------------

    def put(self, snapshot: Snapshot, epoch: int = 0, *, rollback: bool = False) -> None:
        """Save a whole snapshot; `rollback` allows it to have fewer or other tokens than are stored."""
        with self._condition:
            self._accept()
            self._backlog.put(snapshot, epoch, rollback=rollback)

    def append(self, tail: Tail, epoch: int = 0) -> None:
        """Save what a rollout in flight has gained since its last `put` or `append`."""
        with self._condition:
            self._accept()
            self._backlog.append(tail, epoch)

    def mark(self, rollout_id: str, disposition: Disposition, epoch: int = 0) -> None:
        """Save what became of a rollout."""
        with self._condition:
            self._accept()
            self._backlog.mark(rollout_id, disposition, epoch)

    def flush(self) -> Future[None]:
        """A future that is done when everything handed in so far is durable, or was refused and reported."""
        future: Future[None] = Future()
        with self._condition:
            if self._stopped is not None:
                future.set_exception(self._stopped)
            else:
                self._flushes.append((self._backlog.ticket, future))
                self._condition.notify_all()
        return future

    def claim(self, *, ids: Sequence[str] | None = None, force: bool = False) -> Future[Claim]:
        """Claim for this owner (see `SnapshotStore.claim`); fails with StoreUnavailable rather than trying again."""
        return self.call(lambda: self._claim(ids, force=force))

    def call(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` in the writer's thread, between two groups: the way to use the store for anything else."""
        future: Future[T] = Future()
        with self._condition:
            if self._stopped is not None:
                future.set_exception(self._stopped)
            else:
                self._calls.append((job, future))
                self._condition.notify_all()
        return future

    def admit(self) -> None:
        """Raise StoreUnavailable when new rollouts cannot be taken: the backlog is over its bound, or closed."""
        with self._condition:
            if self._stopped is not None:
                raise self._stopped
            waiting, size = self._waiting()
            if waiting < self.settings.max_operations and size < self.settings.max_bytes:
                return
            told = f"; last error: {self._last_error}" if self._tries else ""
            raise StoreUnavailable(
                f"the snapshot store is behind: {waiting} rollouts and {size} bytes wait to be saved "
                f"(bounds {self.settings.max_operations} and {self.settings.max_bytes}){told}"
            )

    def stats(self) -> dict[str, Any]:
        """Counters, and what waits now. `failing_tries` above 0 means the store refuses at this moment."""
        with self._condition:
            waiting, size = self._waiting()
            return {
                "backlog_operations": waiting,
                "backlog_bytes": size,
                "failing_tries": self._tries,
                "last_error": self._last_error,
                **self._counts,
            }

    def close(self, timeout: float | None = 30.0) -> None:
        """Save what waits, give up the leases, stop. The store stays open. Closing twice does nothing.

        Raises StoreUnavailable when that did not work within `timeout` seconds, and says how much was not saved.
        """
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout)
        with self._condition:
            if not self._thread.is_alive():
                return
            waiting, _ = self._waiting()
            error = StoreUnavailable(
                f"{waiting} rollouts could not be saved within {timeout} s: "
                f"{self._last_error or 'the store does not answer'}"
            )
            self._stop(error)
        raise error

    def _accept(self) -> None:
        if self._stopped is not None:
            raise self._stopped
        if self._first_at is None:
            self._first_at = self._clock.monotonic()
            self._condition.notify_all()

    def _waiting(self) -> tuple[int, int]:
        return len(self._backlog) + len(self._group), self._backlog.size + self._group_bytes

    # -- the thread ----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        error = StoreUnavailable("the snapshot writer is closed")
        try:
            while self._step():
                pass
            self._release()
        except (
            BaseException
        ) as bug:  # whatever it is: nobody may wait for ever, nor believe that writes are safe
            error = StoreUnavailable(f"the snapshot writer died: {bug!r}")
            raise
        finally:
            with self._condition:
                self._stop(error)

    def _step(self) -> bool:
        """Wait for something to do, and do it; False when closed and done."""
        with self._condition:
            while not self._due():
                self._clock.wait(self._condition, self._pause())
            if self._stopped is not None:
                return False
            calls, self._calls = self._calls, deque()
        for job, future in calls:
            self._answer(job, future)
        if self._passed(self._renew_at):
            self._renew()
        with self._condition:
            self._fill()
        if self._group and not self._backing_off():
            self._save()
        with self._condition:
            self._resolve()
            return not (self._closing and not self._waiting()[0] and not self._calls)

    def _due(self) -> bool:
        if self._stopped is not None or self._calls or self._passed(self._renew_at):
            return True
        if self._group:
            return not self._backing_off()
        return self._ripe() or self._closing or bool(self._flushes)

    def _ripe(self) -> bool:
        """Whether what waits should wait no longer."""
        if not self._backlog or self._first_at is None:
            return False
        hurried = self._closing or bool(self._flushes) or self._backlog.size >= self.settings.group_bytes
        return hurried or self._passed(self._first_at + self.settings.linger)

    def _pause(self) -> float | None:
        moments = [self._renew_at]
        if self._group:
            moments.append(self._retry_at)
        elif self._first_at is not None:
            moments.append(self._first_at + self.settings.linger)
        given = [moment for moment in moments if moment is not None]
        return max(0.0, min(given) - self._clock.monotonic()) if given else None

    def _passed(self, moment: float | None) -> bool:
        return moment is not None and self._clock.monotonic() >= moment

    def _backing_off(self) -> bool:
        return self._retry_at is not None and not self._passed(self._retry_at)

    def _fill(self) -> None:
        if not self._group and self._ripe():
            self._group = self._backlog.take(self.settings.group_operations, self.settings.group_bytes)
            self._group_bytes = sum(entry.size for entry in self._group)
            self._first_at = self._clock.monotonic() if self._backlog else None

    def _answer(self, job: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job())
        except Exception as error:  # noqa: BLE001  it belongs to whoever holds the future
            future.set_exception(error)

    def _claim(self, ids: Sequence[str] | None, *, force: bool) -> Claim:
        claim = self._saver.claim(ids, force=force)
        self._schedule_renewal()
        return claim

    def _renew(self) -> None:
        try:
            self._saver.renew()
        except Exception as error:  # noqa: BLE001  the lease runs out meanwhile; fencing keeps that safe
            self._note(error)
            self._renew_at = self._clock.monotonic() + min(self.settings.retry_max, self.settings.ttl / 3)
        else:
            self._schedule_renewal()

    def _schedule_renewal(self) -> None:
        self._renew_at = self._clock.monotonic() + self.settings.ttl / 3

    def _save(self) -> None:
        began = self._clock.monotonic()
        try:
            tally = self._saver.save(tuple(self._group), self._refuse)
        except Exception as error:  # noqa: BLE001  whatever the store's trouble is: it is told, and tried again
            self._fail(error)
        else:
            self._succeed(tally, self._clock.monotonic() - began)

    def _refuse(self, entry: Entry, error: Exception) -> None:
        """Never again this one; the others of the group go on."""
        fenced = isinstance(error, Fenced)
        with self._condition:
            self._group.remove(entry)
            self._group_bytes -= entry.size
            self._counts["fenced" if fenced else "refused"] += 1
        if not fenced:
            self._note(error)
        try:
            if fenced:
                self._on_fenced(entry.id)
            else:
                self._on_error(entry.id, error)
        except Exception as bug:  # noqa: BLE001  a caller's callback is no reason to stop saving
            self._note(bug)

    def _succeed(self, tally: Tally, duration: float) -> None:
        if self._renew_at is None:
            self._schedule_renewal()
        with self._condition:
            self._counts["saved"] += len(self._group)
            self._counts["groups"] += 1
            self._group, self._group_bytes = [], 0
            self._tries, self._retry_at = 0, None
            backlog = len(self._backlog)
        self._emit(
            SnapshotSaved(
                **self._stamp(),
                snapshots=tally.snapshots,
                tails=tally.tails,
                marks=tally.marks,
                bytes=tally.size,
                duration_s=duration,
                backlog=backlog,
            )
        )

    def _fail(self, error: Exception) -> None:
        with self._condition:
            self._counts["failures"] += 1
            self._tries += 1
            pause = min(self.settings.retry_max, self.settings.retry_initial * 2 ** min(self._tries - 1, 20))
            self._retry_at = self._clock.monotonic() + pause
            waiting, _ = self._waiting()
        self._note(error)
        self._emit(
            SnapshotFailed(
                **self._stamp(),
                operations=len(self._group),
                error=shorten(str(error)) or type(error).__name__,
                tries=self._tries,
                backlog=waiting,
                retry_s=pause,
            )
        )

    def _note(self, error: Exception) -> None:
        with self._condition:
            self._last_error = str(error) if isinstance(error, SnapshotError) else repr(error)

    def _emit(self, record: Record) -> None:
        try:
            self._journal.emit(record)
        except Exception as error:  # noqa: BLE001  a log that cannot be written shows at the next flush
            self._note(error)

    def _stamp(self) -> dict[str, Any]:
        identity = self._journal.identity
        return {
            "ts": self._clock.wall(),
            "run_id": identity.run_id,
            "process_id": identity.process_id,
            "step": self._journal.step,
        }

    def _resolve(self) -> None:
        """Tell those whose writes are all done."""
        first = self._group[0] if self._group else (self._backlog.entries[0] if self._backlog else None)
        while self._flushes and (first is None or first.ticket > self._flushes[0][0]):
            _, future = self._flushes.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _release(self) -> None:
        if self._stopped is not None:
            return
        try:
            self._saver.release()
        except Exception as error:  # noqa: BLE001  the leases run out by themselves
            self._note(error)

    def _stop(self, error: StoreUnavailable) -> None:
        if self._stopped is not None:
            return
        self._stopped = error
        waiting = [future for _, future in self._flushes] + [future for _, future in self._calls]
        self._flushes.clear()
        self._calls.clear()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._condition.notify_all()
