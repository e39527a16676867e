"""One schema and one set of SQL for every database; a dialect is a small subclass.

Four tables: `lifecycle_store` (one row: schema version and the counter of epochs), `lifecycle_rollouts` (heads: small
rows, cheap to list, claim and mark), `lifecycle_pieces` (payloads: piece 0 is a snapshot, the others are tails) and
`lifecycle_owners` (leases). A checkpoint adds one piece and updates one head, however long the rollout is.

Where SQLite and PostgreSQL differ: the placeholder, the type of bytes, the row lock, how a transaction begins, and
the exceptions. All of it is in the subclasses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from lifecycle.errors import SnapshotCorrupt
from lifecycle.states import FINAL_STATES, RolloutState
from lifecycle.stores.base import BaseStore
from lifecycle.stores.protocol import StoredRow, StoreTooNew
from lifecycle.stores.rules import ENDING_DISPOSITIONS, Head

STORE_SCHEMA = 1
"""Version of the tables. Any change raises it; a store with a higher one is refused, a lower one is upgraded."""

TABLES = (
    """CREATE TABLE IF NOT EXISTS lifecycle_store (
        one INTEGER PRIMARY KEY CHECK (one = 1), schema_version INTEGER NOT NULL, epoch BIGINT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS lifecycle_owners (
        owner TEXT PRIMARY KEY, lease_until DOUBLE PRECISION NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS lifecycle_rollouts (
        id TEXT PRIMARY KEY, state TEXT NOT NULL, disposition TEXT NOT NULL, tokens BIGINT NOT NULL,
        attempt BIGINT NOT NULL, epoch BIGINT NOT NULL, owner TEXT, updated_at DOUBLE PRECISION NOT NULL,
        token_crc BIGINT NOT NULL, logprob_crc BIGINT NOT NULL, pieces BIGINT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS lifecycle_pieces (
        id TEXT NOT NULL, number BIGINT NOT NULL, payload {blob} NOT NULL, PRIMARY KEY (id, number))""",
    "INSERT INTO lifecycle_store (one, schema_version, epoch) VALUES (1, {schema}, 0) ON CONFLICT DO NOTHING",
)


def _quoted(values: frozenset[Any]) -> str:
    return ", ".join(f"'{value}'" for value in sorted(values))


COLUMNS = "id, state, disposition, tokens, attempt, epoch, owner, updated_at, token_crc, logprob_crc, pieces"
_R_COLUMNS = ", ".join(f"r.{name}" for name in COLUMNS.split(", "))
_WAITED_FOR = (
    f"r.state <> '{RolloutState.DISCARDED}' AND NOT "
    f"(r.state IN ({_quoted(FINAL_STATES)}) AND r.disposition IN ({_quoted(ENDING_DISPOSITIONS)}))"
)
FIND = f"SELECT {COLUMNS} FROM lifecycle_rollouts WHERE id = ?"  # noqa: S608  constants only, here and below
READ = (
    f"SELECT {_R_COLUMNS}, p.payload FROM lifecycle_rollouts r LEFT JOIN lifecycle_pieces p ON p.id = r.id "  # noqa: S608
    "WHERE r.id = ? ORDER BY p.number"
)
INSERT = (
    f"INSERT INTO lifecycle_rollouts ({COLUMNS}) VALUES ({', '.join('?' * 11)}) "  # noqa: S608
    "ON CONFLICT (id) DO NOTHING"
)
UPDATE = (
    "UPDATE lifecycle_rollouts SET state = ?, disposition = ?, tokens = ?, attempt = ?, epoch = ?, owner = ?, "
    "updated_at = ?, token_crc = ?, logprob_crc = ?, pieces = ? WHERE id = ?"
)
ADD_PIECE = "INSERT INTO lifecycle_pieces (id, number, payload) VALUES (?, ?, ?)"
DROP_PIECES = "DELETE FROM lifecycle_pieces WHERE id = ?"
DELETE = "DELETE FROM lifecycle_rollouts WHERE id = ?"
LIST = (
    "SELECT r.id, r.state, r.disposition, r.tokens, r.attempt, r.epoch, r.owner, o.lease_until, r.updated_at "
    "FROM lifecycle_rollouts r LEFT JOIN lifecycle_owners o ON o.owner = r.owner"
)
LIST_PENDING = f"{LIST} WHERE {_WAITED_FOR}"
RAISE_EPOCH = "UPDATE lifecycle_store SET epoch = epoch + 1"
EPOCH = "SELECT epoch FROM lifecycle_store"
VERSION = "SELECT schema_version FROM lifecycle_store"
SEIZE = (
    f"UPDATE lifecycle_rollouts AS r SET owner = ?, epoch = ? WHERE {_WAITED_FOR} AND (? = 1 OR r.epoch = ? "  # noqa: S608
    "OR r.owner IS NULL OR NOT EXISTS "
    "(SELECT 1 FROM lifecycle_owners o WHERE o.owner = r.owner AND o.lease_until > ?))"
)
SEIZE_ONE = f"{SEIZE} AND r.id = ?"
SEIZED = "SELECT id FROM lifecycle_rollouts WHERE epoch = ? AND owner = ?"
LEASE = "SELECT lease_until FROM lifecycle_owners WHERE owner = ?"
SET_LEASE = (
    "INSERT INTO lifecycle_owners (owner, lease_until) VALUES (?, ?) "
    "ON CONFLICT (owner) DO UPDATE SET lease_until = excluded.lease_until"
)
DROP_LEASE = "DELETE FROM lifecycle_owners WHERE owner = ?"
OWNED = f"SELECT COUNT(*) FROM lifecycle_rollouts r WHERE r.owner = ? AND {_WAITED_FOR}"  # noqa: S608
ORPHANS = "SELECT DISTINCT p.id FROM lifecycle_pieces p LEFT JOIN lifecycle_rollouts r ON r.id = p.id WHERE r.id IS NULL"

NO_EPOCH = -1


class SqlStore(BaseStore):
    """The primitives of a store as SQL."""

    blob: ClassVar[str]
    lock: ClassVar[str] = ""

    @abstractmethod
    def _query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run a SELECT."""

    @abstractmethod
    def _run(self, sql: str, *values: Any) -> int:
        """Run a statement that returns nothing; how many rows it touched."""

    def _create(self, where: str) -> None:
        """Create what is missing, in one transaction. Raises StoreTooNew."""
        self._begin()
        for statement in TABLES:
            self._run(statement.format(blob=self.blob, schema=STORE_SCHEMA))
        self._check_version(where)
        self._commit()

    def _check_version(self, where: str) -> None:
        found = int(self._query(VERSION)[0][0])
        if found > STORE_SCHEMA:
            raise StoreTooNew(where, found, STORE_SCHEMA)

    def _find(self, rollout_id: str) -> Head | None:
        rows = self._query(FIND + self.lock, rollout_id)
        return _head(rows[0]) if rows else None

    def _read(self, rollout_id: str) -> tuple[Head, list[bytes]] | None:
        rows = self._query(READ, rollout_id)
        if not rows:
            return None
        pieces = [row[-1] for row in rows if row[-1] is not None]
        if not all(isinstance(piece, bytes) for piece in pieces):
            raise SnapshotCorrupt(rollout_id, "one of its payloads is not bytes")
        return _head(rows[0][:-1]), pieces

    def _insert(self, head: Head, payload: bytes) -> bool:
        if self._run(INSERT, head.id, *_values(head)) == 0:
            return False
        self._run(ADD_PIECE, head.id, 0, payload)
        return True

    def _replace(self, head: Head, payload: bytes | None) -> None:
        self._run(UPDATE, *_values(head), head.id)
        if payload is not None:
            self._run(DROP_PIECES, head.id)
            self._run(ADD_PIECE, head.id, 0, payload)

    def _extend(self, head: Head, payload: bytes) -> None:
        self._run(UPDATE, *_values(head), head.id)
        self._run(ADD_PIECE, head.id, head.pieces - 1, payload)

    def _delete(self, rollout_id: str) -> bool:
        self._run(DROP_PIECES, rollout_id)
        return self._run(DELETE, rollout_id) > 0

    def _listing(self, *, pending: bool) -> list[StoredRow]:
        # Sorted here: databases order text by their own collation. In a damaged file even an id may be no text.
        rows = self._query(LIST_PENDING if pending else LIST)
        return sorted((StoredRow(str(row[0]), *row[1:]) for row in rows), key=lambda row: row.id)

    def _next_epoch(self) -> int:
        self._run(RAISE_EPOCH)
        return int(self._query(EPOCH)[0][0])

    def _seize(
        self, owner: str, epoch: int, now: float, ids: Sequence[str] | None, *, force: bool
    ) -> list[str]:
        unsure = NO_EPOCH if self._unsure is None else self._unsure
        values = (owner, epoch, int(force), unsure, now)
        if ids is None:
            self._run(SEIZE, *values)
        for rollout_id in () if ids is None else ids:
            self._run(SEIZE_ONE, *values, rollout_id)
        return sorted(str(row[0]) for row in self._query(SEIZED, epoch, owner))

    def _lease(self, owner: str) -> float | None:
        rows = self._query(LEASE, owner)
        return float(rows[0][0]) if rows else None

    def _set_lease(self, owner: str, until: float | None) -> None:
        if until is None:
            self._run(DROP_LEASE, owner)
        else:
            self._run(SET_LEASE, owner, until)

    def _owned(self, owner: str) -> int:
        return int(self._query(OWNED, owner)[0][0])

    def problems(self) -> list[str]:
        """Damage that no single rollout shows: here, payloads without a row."""
        with self._reading():
            return [
                f"payloads of rollout {str(row[0])!r} are left without a row" for row in self._query(ORPHANS)
            ]


def _values(head: Head) -> tuple[Any, ...]:
    return (
        head.state,
        head.disposition,
        head.tokens,
        head.attempt,
        head.epoch,
        head.owner,
        head.updated_at,
        head.token_crc,
        head.logprob_crc,
        head.pieces,
    )


def _head(row: Sequence[Any]) -> Head:
    """A head, after a look at the types: in a damaged file a number may have become something else."""
    head = Head(*row)
    numbers = (head.tokens, head.attempt, head.epoch, head.token_crc, head.logprob_crc, head.pieces)
    if not all(isinstance(number, int) for number in numbers):
        raise SnapshotCorrupt(str(head.id), "its row holds something else where numbers belong")
    return head
