"""Where the staging table gets its rows from: a source as a table in SQL, and the words that its enums know."""

from __future__ import annotations

from collections.abc import Sequence

from lifecycle.analysis import duck, schema
from lifecycle.analysis.sources import Source
from lifecycle.errors import ConfigurationError
from lifecycle.states import Disposition, Reason


def define_words(connection: duck.Database, states: Sequence[str], triggers: Sequence[str]) -> None:
    """Create the enums. A word that they do not hold is read as null."""
    words: dict[str, Sequence[str]] = {
        "event_name": schema.EVENTS,
        "state_name": states,
        "trigger_name": triggers,
        "reason_name": list(Reason),
        "disposition_name": list(Disposition),
    }
    for name, values in words.items():
        listed = ", ".join(duck.quoted(value) for value in values)
        connection.execute(f"CREATE TYPE {name} AS ENUM ({listed})")


def reader(connection: duck.Database, source: Source, *, strict: bool) -> str:
    """The table of a source's rows, with the columns that a report looks at. Raises ConfigurationError."""
    columns = schema.staged_columns(strict=strict)
    if source.is_parquet:
        return _parquet_reader(connection, source, columns)
    return (
        f"read_json({duck.quoted(source.path)}, format = 'newline_delimited', compression = "
        f"'{source.compression}', ignore_errors = true, columns = {duck.struct(columns)})"
    )


def _parquet_reader(connection: duck.Database, source: Source, columns: dict[str, str]) -> str:
    rows = f"read_parquet({duck.quoted(source.path)})"
    held = connection.execute(f"DESCRIBE SELECT * FROM {rows}").fetchall()  # noqa: S608  a quoted path
    names = {str(row[0]) for row in held}
    if not {"event", "ts", "process_id"} <= names:
        raise ConfigurationError(
            f"{source} is not a lifecycle log: it has no columns event, ts and process_id"
        )
    picked = ", ".join(_from_parquet(name, kind, names) for name, kind in columns.items())
    return f"(SELECT {picked} FROM {rows})"  # noqa: S608  names of ours and a quoted path


def _from_parquet(name: str, kind: str, held: set[str]) -> str:
    if name not in held:
        return f"NULL::{kind} AS {name}"
    if name == "members":
        return f"to_json({name})::VARCHAR AS {name}"
    if name == "spans":
        return f"json_transform(spans, '[[\"VARCHAR\"]]') AS {name}"
    return f"try_cast({name} AS {kind}) AS {name}"
