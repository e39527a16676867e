"""The embedded store: one SQLite file, written ahead, safe for several processes."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Any, ClassVar

from lifecycle.errors import ConfigurationError, SnapshotCorrupt, SnapshotError, StoreUnavailable
from lifecycle.stores.base import Clock
from lifecycle.stores.protocol import StoreTooNew
from lifecycle.stores.rules import Head
from lifecycle.stores.sql import STORE_SCHEMA, SqlStore

APPLICATION_ID = 0x524C534E  # "RLSN": how `file` and we tell a store from any other database
BUSY_SECONDS = 5.0
PATIENCE_SECONDS = 0.01
BUSY = frozenset({"SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_BUSY_RECOVERY", "SQLITE_BUSY_SNAPSHOT"})
_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",  # a commit is on the disk, not only in the operating system
    "wal_autocheckpoint = 4000",
    "journal_size_limit = 67108864",
    "cell_size_check = ON",
    "cache_size = -16384",
)


class SqliteStore(SqlStore):
    """Snapshots in one SQLite file (with `-wal` and `-shm` beside it while it is open).

    Created where it is missing, unless `create` is false; `read_only` neither creates nor changes anything. `busy`
    is how many seconds a write waits for another process's. Raises ConfigurationError when the path cannot be opened
    or is something else, StoreTooNew when a newer version wrote it.
    """

    blob: ClassVar[str] = "BLOB"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock = time.time,
        create: bool = True,
        read_only: bool = False,
        busy: float = BUSY_SECONDS,
    ) -> None:
        super().__init__(clock)
        self.path = Path(path)
        self._closed = False
        if self.path.is_dir() or ((read_only or not create) and not self.path.exists()):
            raise ConfigurationError(f"no snapshot store at {self.path}")
        try:
            self._open(read_only=read_only, busy=busy)
        except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
            raise self._refusal(error) from error

    def _open(self, *, read_only: bool, busy: float) -> None:
        if not read_only:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        uri = f"{self.path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        self._connection = sqlite3.connect(
            uri, uri=True, timeout=busy, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        self._connection.text_factory = _text
        try:
            self._prepare_patiently(read_only=read_only, busy=busy)
        except BaseException:
            self._connection.close()
            raise

    def _prepare_patiently(self, *, read_only: bool, busy: float) -> None:
        """SQLite does not wait for a lock while it changes the journal mode, as those do who create a file together."""
        deadline = time.monotonic() + busy
        while True:
            try:
                self._prepare(read_only=read_only)
            except sqlite3.OperationalError as error:
                if _name(error) not in BUSY or time.monotonic() >= deadline:
                    raise
                time.sleep(PATIENCE_SECONDS)
            else:
                return

    def _prepare(self, *, read_only: bool) -> None:
        # In this order: another process may be creating it, and does so in one transaction.
        empty = not self._query("SELECT 1 FROM sqlite_master LIMIT 1")
        if (read_only or not empty) and self._pragma("application_id") != APPLICATION_ID:
            raise ConfigurationError(f"{self.path} is a database, but not a snapshot store")
        if self._pragma("user_version") > STORE_SCHEMA:
            raise StoreTooNew(str(self.path), self._pragma("user_version"), STORE_SCHEMA)
        if read_only:
            return
        if empty:
            self._connection.execute("PRAGMA page_size = 16384")
        for pragma in _PRAGMAS:
            self._connection.execute(f"PRAGMA {pragma}").fetchall()
        if empty:
            self._create(str(self.path))

    def _create(self, where: str) -> None:
        self._begin()
        self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        self._connection.execute(f"PRAGMA user_version = {STORE_SCHEMA}")
        super()._create(where)

    def _refusal(self, error: Exception) -> SnapshotError | ConfigurationError:
        told = error.strerror if isinstance(error, OSError) else str(error)
        if _name(error) in BUSY:
            return StoreUnavailable(f"the snapshot store {self.path} is locked by another process")
        if _name(error) in {"SQLITE_NOTADB", "SQLITE_CORRUPT"}:
            return ConfigurationError(f"{self.path} is not a snapshot store, or is damaged: {told}")
        return ConfigurationError(f"cannot open the snapshot store {self.path}: {told}")

    def _pragma(self, name: str) -> int:
        return int(self._query(f"PRAGMA {name}")[0][0])

    def _begin(self) -> None:
        if not self._connection.in_transaction:
            self._connection.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        if not self._closed and self._connection.in_transaction:
            self._connection.execute("COMMIT")

    def _rollback(self) -> None:
        if not self._closed and self._connection.in_transaction:
            self._connection.rollback()

    def _translated(self, error: Exception) -> SnapshotError | None:
        # In a damaged file SQLite's own message may quote bytes that are no text.
        if isinstance(error, sqlite3.Error | UnicodeDecodeError):
            return StoreUnavailable(f"snapshot store {self.path}: {error}")
        return None

    def _read(self, rollout_id: str) -> tuple[Head, list[bytes]] | None:
        try:
            return super()._read(rollout_id)
        except sqlite3.DatabaseError as error:
            if _name(error) in {"SQLITE_CORRUPT", "SQLITE_CORRUPT_INDEX", "SQLITE_TOOBIG"}:
                raise SnapshotCorrupt(
                    rollout_id, f"its pages in {self.path} cannot be read: {error}"
                ) from error
            raise

    def _query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()

    def _run(self, sql: str, *values: Any) -> int:
        return self._connection.execute(sql, values).rowcount

    def problems(self) -> list[str]:
        """What SQLite's own check of the file finds: damage that no single rollout shows, such as lost rows."""
        try:
            with self._reading():
                found = [str(row[0]) for row in self._query("PRAGMA integrity_check(20)")]
            return super().problems() if found == ["ok"] else found
        except StoreUnavailable as error:
            return [str(error)]

    def _shut(self) -> None:
        if not self._closed:
            self._closed = True
            self._connection.close()


def _text(data: bytes) -> str:
    """Text from a file that may be damaged: never an error in the middle of a listing."""
    return data.decode("utf-8", "replace")


def _name(error: Exception) -> str:
    return str(getattr(error, "sqlite_errorname", ""))
