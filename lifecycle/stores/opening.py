"""From the words of a command line to a store."""

from __future__ import annotations

import re
from pathlib import Path

from lifecycle.stores.postgres import PostgresStore
from lifecycle.stores.sql import SqlStore
from lifecycle.stores.sqlite import SqliteStore

RUN_STORE = "snapshots.db"
"""The store in a directory of `lifecycle run`."""

_DSN = re.compile(r"postgres(ql)?://|\s*(host|hostaddr|port|dbname|user|service|password)\s*=")


def is_dsn(where: str) -> bool:
    """Whether it names a PostgreSQL database rather than a file."""
    return _DSN.match(where) is not None


def open_store(where: str, *, create: bool = True, read_only: bool = False) -> SqlStore:
    """Open a SQLite file, the store of a run directory, or a PostgreSQL database.

    `read_only` implies that nothing is created. Raises ConfigurationError, StoreTooNew or StoreUnavailable.
    """
    if is_dsn(where):
        return PostgresStore(where, create=create and not read_only)
    path = Path(where)
    if path.is_dir():
        path /= RUN_STORE
    return SqliteStore(path, create=create, read_only=read_only)
