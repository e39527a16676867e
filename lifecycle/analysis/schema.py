"""The columns of the log for a database, from the record classes: explicit always, never guessed from the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from lifecycle.log.records import RECORD_TYPES, columns, event_name

EVENTS: Final = tuple(event_name(record_type) for record_type in RECORD_TYPES)

_KINDS: Final = {"str": "VARCHAR", "int": "BIGINT", "float": "DOUBLE", "dict": "VARCHAR"}
_LISTS: Final = {"members": "VARCHAR[]", "rids": "VARCHAR[]", "spans": "VARCHAR"}

ENUM_COLUMNS: Final = {
    "event": "event_name",
    "trigger": "trigger_name",
    "source": "state_name",
    "dest": "state_name",
    "state": "state_name",
    "reason": "reason_name",
    "disposition": "disposition_name",
}
NARROW: Final = {
    "seq": "UINTEGER",
    "attempt": "USMALLINT",
    "tokens": "UINTEGER",
    "new_tokens": "UINTEGER",
    "dropped_tokens": "UINTEGER",
    "versions": "UINTEGER",
    "lag": "INTEGER",
    "requests": "UINTEGER",
    "round": "UINTEGER",
    "dwell_s": "FLOAT",
    "duration_s": "FLOAT",
    "latency_s": "FLOAT",
    "straggler_s": "FLOAT",
    "spans": "VARCHAR[][]",
    "members": "VARCHAR",
    "rids": "VARCHAR[]",
}
STAGED: Final = (
    "event",
    "ts",
    "run_id",
    "process_id",
    "seq",
    "rollout_id",
    "attempt",
    "rid",
    "trigger",
    "source",
    "dest",
    "state",
    "tokens",
    "dropped_tokens",
    "reason",
    "disposition",
    "dwell_s",
    "duration_s",
    "latency_s",
    "straggler_s",
    "lag",
    "worker",
    "versions",
    "from_process",
    "mode",
    "status",
    "strategy",
    "requests",
    "round",
    "rids",
    "kind",
    "tables",
)
STAGED_STRICT: Final = ("group_id", "new_tokens", "spans", "members")


def full_columns() -> dict[str, str]:
    """Every key of every event with its column type: what Parquet files hold. Objects and spans are JSON text."""
    return {name: _LISTS.get(name) or _KINDS[kind] for name, kind in columns().items()}


def staged_columns(*, strict: bool) -> dict[str, str]:
    """The keys that a report looks at, in the narrow types of the staging table."""
    wide = full_columns()
    names: Iterable[str] = (*STAGED, *STAGED_STRICT) if strict else STAGED
    return {name: ENUM_COLUMNS.get(name) or NARROW.get(name) or wide[name] for name in names}
