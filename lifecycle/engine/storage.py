"""The engine's side of a snapshot store: hand over and go on; wait only where durability was asked for."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread

from lifecycle.engine.hop import outcome
from lifecycle.engine.settings import EngineSettings
from lifecycle.errors import StoreUnavailable
from lifecycle.log.journal import Journal
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition
from lifecycle.stores.inline import InlineWriter
from lifecycle.stores.protocol import Claim, SnapshotStore
from lifecycle.stores.writer import StoreWriter, WriterSettings


class Storage:
    """A writer with an event loop in front of it (a thread, or inline where the store asks for it); nothing without a store."""

    def __init__(self, store: SnapshotStore | None, journal: Journal, settings: EngineSettings) -> None:
        self._settings = settings
        self._fenced: deque[str] = deque()
        self._errors: deque[tuple[str, Exception]] = deque()
        self._progress: tuple[int, float] | None = None
        self._silent = 0.0
        self.writer: StoreWriter | InlineWriter | None = None
        if store is not None:
            self.writer = self._writer(store, journal)

    def _writer(self, store: SnapshotStore, journal: Journal) -> StoreWriter | InlineWriter:
        owner, ttl = journal.identity.process_id, self._settings.lease_seconds
        if getattr(store, "inline", False):
            return InlineWriter(
                store,
                owner=owner,
                ttl=ttl,
                journal=journal,
                on_fenced=self._fenced.append,
                on_error=self._refused,
            )
        return StoreWriter(
            store,
            owner=owner,
            journal=journal,
            settings=WriterSettings(
                ttl=ttl,
                max_operations=self._settings.backlog_rollouts,
                max_bytes=self._settings.backlog_bytes,
            ),
            on_fenced=self._fenced.append,
            on_error=self._refused,
        )

    def _refused(self, rollout_id: str, error: Exception) -> None:
        self._errors.append((rollout_id, error))

    @property
    def enabled(self) -> bool:
        """Whether anything is stored at all."""
        return self.writer is not None

    def admit(self) -> None:
        """Raise StoreUnavailable when the backlog is over its bound."""
        if self.writer is not None:
            self.writer.admit()

    def put(self, snapshot: Snapshot, epoch: int, *, rollback: bool = False) -> None:
        """Queue a whole snapshot; only where `enabled`, like the next two."""
        assert self.writer is not None
        self.writer.put(snapshot, epoch, rollback=rollback)

    def append(self, tail: Tail, epoch: int) -> None:
        """Queue a tail."""
        assert self.writer is not None
        self.writer.append(tail, epoch)

    def mark(self, rollout_id: str, disposition: Disposition, epoch: int) -> None:
        """Queue a disposition."""
        assert self.writer is not None
        self.writer.mark(rollout_id, disposition, epoch)

    async def durable(self) -> None:
        """Wait until everything queued so far is on disk."""
        if self.writer is not None:
            await outcome(self.writer.flush())

    async def settled(self, within: float) -> None:
        """The same for at most `within` seconds, for callers who have something to tell in either case."""
        with suppress(StoreUnavailable), anyio.move_on_after(within):
            await self.durable()

    async def claim(self, *, force: bool) -> Claim:
        """Become the owner of what is stored and unfinished.

        What is queued goes out first, under the epochs it was queued with. A store that does not answer says so
        itself, to the claim.
        """
        if self.writer is None:
            return Claim(())
        await self.settled(self._settings.control_timeout)
        return await outcome(self.writer.claim(force=force))

    def take_fenced(self) -> list[str]:
        """Ids that another owner has taken over since the last call."""
        taken = list(self._fenced)
        for _ in taken:
            self._fenced.popleft()
        return taken

    def take_errors(self) -> list[tuple[str, Exception]]:
        """Writes that the store refused for good since the last call."""
        taken = list(self._errors)
        for _ in taken:
            self._errors.popleft()
        return taken

    def silent_for(self, now: float) -> float:
        """Seconds in which the store has saved nothing though something waits; to be asked now and then."""
        stats = self.stats()
        saved = stats.get("groups", 0)
        waits = bool(stats.get("backlog_operations"))
        if not waits:
            self._progress = None
        elif self._progress is None or self._progress[0] != saved:
            self._progress = (saved, now)
        self._silent = 0.0 if self._progress is None else now - self._progress[1]
        return self._silent

    def stats(self) -> dict[str, Any]:
        """What the writer says of itself, and `silent_s`: see `silent_for`."""
        return {} if self.writer is None else {**self.writer.stats(), "silent_s": self._silent}

    async def close(self) -> None:
        """Write what is queued, release the leases, close; bounded."""
        if self.writer is None:
            return
        writer = self.writer
        if isinstance(writer, InlineWriter):
            writer.close()
            return
        own = anyio.CapacityLimiter(
            1
        )  # whoever has used up the threads of the process must not keep us from closing
        await anyio.to_thread.run_sync(lambda: writer.close(self._settings.close_timeout), limiter=own)
