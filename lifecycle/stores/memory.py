"""A store in this process's memory: for tests, and for runs that need no crash recovery."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from lifecycle.errors import SnapshotError
from lifecycle.stores.base import BaseStore, Clock
from lifecycle.stores.protocol import StoredRow
from lifecycle.stores.rules import Head


class MemoryStore(BaseStore):
    """Keeps encoded snapshots in a dict; everything written is as durable as the process at once."""

    inline = True
    """An engine writes to it directly, without a writer's thread in between."""

    def __init__(self, *, clock: Clock = time.time) -> None:
        super().__init__(clock)
        self._heads: dict[str, Head] = {}
        self._pieces: dict[str, list[bytes]] = {}
        self._leases: dict[str, float] = {}
        self._epoch = 0

    def _begin(self) -> None: ...

    def _commit(self) -> None: ...

    def _rollback(self) -> None: ...

    def _shut(self) -> None: ...

    def _translated(self, error: Exception) -> SnapshotError | None:  # noqa: ARG002  memory has no troubles
        return None

    def _find(self, rollout_id: str) -> Head | None:
        return self._heads.get(rollout_id)

    def _read(self, rollout_id: str) -> tuple[Head, list[bytes]] | None:
        head = self._heads.get(rollout_id)
        return None if head is None else (head, list(self._pieces[rollout_id]))

    def _insert(self, head: Head, payload: bytes) -> bool:
        self._replace(head, payload)
        return True

    def _replace(self, head: Head, payload: bytes | None) -> None:
        self._heads[head.id] = head
        if payload is not None:
            self._pieces[head.id] = [payload]

    def _extend(self, head: Head, payload: bytes) -> None:
        self._heads[head.id] = head
        self._pieces[head.id].append(payload)

    def _delete(self, rollout_id: str) -> bool:
        self._pieces.pop(rollout_id, None)
        return self._heads.pop(rollout_id, None) is not None

    def _listing(self, *, pending: bool) -> list[StoredRow]:
        heads = sorted(self._heads.values(), key=lambda head: head.id)
        return [self._row(head) for head in heads if not (pending and head.ended)]

    def _row(self, head: Head) -> StoredRow:
        return StoredRow(
            id=head.id,
            state=head.state,
            disposition=head.disposition,
            tokens=head.tokens,
            attempt=head.attempt,
            epoch=head.epoch,
            owner=head.owner,
            lease_until=None if head.owner is None else self._leases.get(head.owner),
            updated_at=head.updated_at,
        )

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def _seize(
        self, owner: str, epoch: int, now: float, ids: Sequence[str] | None, *, force: bool
    ) -> list[str]:
        wanted = None if ids is None else set(ids)
        seized = [
            head.id
            for head in self._heads.values()
            if not head.ended
            and (wanted is None or head.id in wanted)
            and (force or not self._held(head, now))
        ]
        for rollout_id in seized:
            self._heads[rollout_id] = replace(self._heads[rollout_id], owner=owner, epoch=epoch)
        return sorted(seized)

    def _held(self, head: Head, now: float) -> bool:
        return head.owner is not None and self._leases.get(head.owner, now) > now

    def _lease(self, owner: str) -> float | None:
        return self._leases.get(owner)

    def _set_lease(self, owner: str, until: float | None) -> None:
        if until is None:
            self._leases.pop(owner, None)
        else:
            self._leases[owner] = until

    def _owned(self, owner: str) -> int:
        return sum(1 for head in self._heads.values() if head.owner == owner and not head.ended)
