"""Durable snapshots: the protocol, three stores, and the writer thread between an event loop and a store."""

from __future__ import annotations

from lifecycle.stores.memory import MemoryStore
from lifecycle.stores.opening import open_store
from lifecycle.stores.postgres import PostgresStore
from lifecycle.stores.protocol import Claim, Claimed, SnapshotStore, StoredRow, StoreTooNew
from lifecycle.stores.settings import WriterSettings
from lifecycle.stores.sqlite import SqliteStore
from lifecycle.stores.writer import StoreWriter

__all__ = [
    "Claim",
    "Claimed",
    "MemoryStore",
    "PostgresStore",
    "SnapshotStore",
    "SqliteStore",
    "StoreTooNew",
    "StoreWriter",
    "StoredRow",
    "WriterSettings",
    "open_store",
]
