"""Snapshots for people and for other programs: as plain data, and as columns of a Parquet file."""

from __future__ import annotations

import base64
import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lifecycle.errors import ConfigurationError
from lifecycle.snapshot import Snapshot

PARQUET_COLUMNS: dict[str, str] = {
    "id": "VARCHAR",
    "group_id": "VARCHAR",
    "group_size": "INTEGER",
    "index": "INTEGER",
    "state": "VARCHAR",
    "disposition": "VARCHAR",
    "finish_reason": "VARCHAR",
    "reason": "VARCHAR",
    "detail": "VARCHAR",
    "outcome": "VARCHAR",
    "attempt": "INTEGER",
    "carries": "INTEGER",
    "max_new_tokens": "BIGINT",
    "prompt_ids": "INTEGER[]",
    "prompt_text": "VARCHAR",
    "tokens": "INTEGER[]",
    "logprobs": "DOUBLE[]",
    "weight_versions": 'STRUCT(version VARCHAR, start INTEGER, "end" INTEGER, source VARCHAR)[]',
    "text": "VARCHAR",
    "sampling_params": "JSON",
    "metadata": "JSON",
    "attempts": "JSON",
    "process": "VARCHAR",
}
"""One row per rollout; what is shaped by the user stays JSON."""


def plain(snapshot: Snapshot) -> dict[str, Any]:
    """Everything of a snapshot as JSON knows it: logprobs that are not finite become null, bytes base64."""
    request = snapshot.request
    return {
        "id": snapshot.id,
        "group_id": request.group_id,
        "group_size": request.group_size,
        "index": request.index,
        "state": str(snapshot.state),
        "disposition": str(snapshot.disposition),
        "finish_reason": _word(snapshot.finish_reason),
        "matched": snapshot.matched,
        "reason": _word(snapshot.reason),
        "detail": snapshot.detail,
        "outcome": _word(snapshot.outcome),
        "attempt": snapshot.attempt,
        "fruitless": snapshot.fruitless,
        "carries": snapshot.carries,
        "seq": snapshot.seq,
        "process": snapshot.process,
        "max_new_tokens": request.max_new_tokens,
        "sampling_params": _plain(request.sampling_params),
        "metadata": _plain(request.metadata),
        "routing_key": request.routing_key,
        "extra": _plain(request.extra),
        "prompt_ids": None if snapshot.prompt_ids is None else list(snapshot.prompt_ids),
        "prompt_text": request.text,
        "tokens": snapshot.tokens.tolist(),
        "logprobs": [value if math.isfinite(value) else None for value in snapshot.logprobs],
        "weight_versions": snapshot.weight_versions,
        "text": snapshot.text,
        "attempts": [
            {name: getattr(attempt, name) for name in attempt.__struct_fields__}
            for attempt in snapshot.attempts
        ],
        "channels": {
            name: {
                "complete": channel.complete,
                "pieces": [[start, _plain(data)] for start, data in channel.pieces],
            }
            for name, channel in snapshot.channels.items()
        },
    }


def _word(value: object) -> str | None:
    return None if value is None else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


def write_parquet(snapshots: Iterable[Snapshot], path: Path) -> int:
    """Write one row per snapshot; how many. Raises ConfigurationError without the analysis extra."""
    try:
        import duckdb
    except ImportError as error:
        raise ConfigurationError(
            "--format parquet needs the analysis extra: pip install 'rollout-lifecycle[analysis]'"
        ) from error
    encoder = msgspec.json.Encoder()
    count = 0
    with tempfile.NamedTemporaryFile("wb", suffix=".jsonl") as lines:
        for count, snapshot in enumerate(snapshots, start=1):  # noqa: B007  the number of the last one is used
            row = plain(snapshot)
            lines.write(encoder.encode({name: row[name] for name in PARQUET_COLUMNS}) + b"\n")
        lines.flush()
        connection = duckdb.connect()
        try:
            _copy(connection, lines.name, path)
        except duckdb.Error as error:
            raise ConfigurationError(f"cannot write {path}: {error}") from error
        finally:
            connection.close()
    return count


def _copy(connection: Any, lines: str, path: Path) -> None:
    # The largest line decides: a rollout of 100,000 tokens is some megabytes of JSON.
    source = "read_json(?, format='newline_delimited', columns=?, maximum_object_size=1073741824)"
    target = str(path).replace("'", "''")
    connection.execute(
        f"COPY (SELECT * FROM {source}) TO '{target}' (FORMAT parquet)",  # noqa: S608  DuckDB takes no parameter there
        [lines, PARQUET_COLUMNS],
    )
