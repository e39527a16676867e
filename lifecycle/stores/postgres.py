"""The shared store: a PostgreSQL database, for several trainers or nodes. Needs the extra `postgres`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from lifecycle.errors import ConfigurationError, SnapshotError, StoreUnavailable
from lifecycle.stores.base import Clock
from lifecycle.stores.sql import SqlStore

if TYPE_CHECKING:
    import psycopg

CREATE_LOCK = 0x524C534E
"""Key of the advisory lock under which the tables are created: CREATE TABLE IF NOT EXISTS alone races."""


class PostgresStore(SqlStore):
    """Snapshots in four tables of a PostgreSQL database (13 or newer).

    `dsn` is what libpq takes, a URL or `key=value` words; its password never shows in an error. Tables are created
    in the first schema of the search path, so `options=-csearch_path=my_run` keeps runs apart. Leases are measured
    by the server's clock, so that nodes need not agree on the time; `clock` replaces it, for tests. A lost
    connection is opened again at the next call. Raises ConfigurationError for a DSN that cannot be read or a missing
    extra, StoreUnavailable when the server cannot be reached, StoreTooNew when a newer version made the tables.
    """

    blob: ClassVar[str] = "BYTEA"
    lock: ClassVar[str] = " FOR UPDATE"

    def __init__(
        self, dsn: str, *, clock: Clock | None = None, create: bool = True, connect_timeout: int = 10
    ) -> None:
        super().__init__(clock or time.time)
        self._psycopg = _driver()
        self._local_leases = clock is not None
        self._dsn = self._checked(dsn, connect_timeout)
        self.name = self._describe()
        self._held: psycopg.Connection[tuple[Any, ...]] | None = None
        try:
            with self._guarded():
                self._prepare(create=create)
        except BaseException:
            self._shut()
            raise

    def _checked(self, dsn: str, connect_timeout: int) -> dict[str, Any]:
        try:
            words = self._psycopg.conninfo.conninfo_to_dict(dsn)
        except self._psycopg.ProgrammingError:
            # The driver's message quotes the text that it did not understand, which may be the password.
            raise ConfigurationError(
                "the PostgreSQL DSN cannot be read; right would be postgresql://user@host:5432/database"
            ) from None
        return {"connect_timeout": connect_timeout, **words}

    def _describe(self) -> str:
        words = self._dsn
        return f"postgresql://{words.get('host', 'localhost')}:{words.get('port', 5432)}/{words.get('dbname', '')}"

    def _prepare(self, *, create: bool) -> None:
        missing = self._query("SELECT to_regclass('lifecycle_store') IS NULL")[0][0]
        if missing and not create:
            raise ConfigurationError(f"{self.name} holds no snapshot store")
        if missing:
            self._create(self.name)
        else:
            self._check_version(self.name)

    def _create(self, where: str) -> None:
        self._begin()
        self._query("SELECT pg_advisory_xact_lock(?)", CREATE_LOCK)
        super()._create(where)

    @property
    def _connection(self) -> psycopg.Connection[tuple[Any, ...]]:
        if self._held is None or self._held.closed:
            self._held = self._psycopg.connect(**self._dsn, autocommit=True)
        return self._held

    def lease_clock(self) -> float:
        """The time by which leases are measured: the server's."""
        if self._local_leases:
            return self._clock()
        return float(self._query("SELECT extract(epoch FROM clock_timestamp())::float8")[0][0])

    def _open_transaction(self) -> bool:
        idle = self._psycopg.pq.TransactionStatus.IDLE
        return self._held is not None and not self._held.closed and self._held.info.transaction_status != idle

    def _begin(self) -> None:
        if not self._open_transaction():
            self._run("BEGIN")

    def _commit(self) -> None:
        if self._open_transaction():
            self._run("COMMIT")

    def _rollback(self) -> None:
        if self._held is not None and self._open_transaction():
            # Ends the transaction whatever state the connection is in; the next call opens another.
            self._held.close()

    def _translated(self, error: Exception) -> SnapshotError | None:
        if isinstance(error, self._psycopg.Error):
            return StoreUnavailable(f"snapshot store {self.name}: {_first_line(error)}")
        return None

    def _query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql.replace("?", "%s"), values or None, binary=True).fetchall()

    def _run(self, sql: str, *values: Any) -> int:
        return self._connection.execute(sql.replace("?", "%s"), values or None, binary=True).rowcount

    def _shut(self) -> None:
        if self._held is not None:
            self._held.close()


def _driver() -> Any:
    try:
        import psycopg  # noqa: PLC0415  an extra
        import psycopg.conninfo  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            "a PostgreSQL store needs the postgres extra: pip install 'rollout-lifecycle[postgres]'"
        ) from error
    return psycopg


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
