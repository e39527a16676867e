"""Logs as one Parquet file: explicit columns, damaged lines left out and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lifecycle.analysis import duck, schema
from lifecycle.analysis.sources import Source
from lifecycle.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written, and how many lines could not be."""

    path: Path
    rows: int
    damaged: int


def to_parquet(sources: Sequence[Source], path: Path) -> Converted:
    """Write every whole line of `sources` as a row, in the order of the files, compressed with zstd.

    Raises ConfigurationError when a source is Parquet already, or a file cannot be read or written.
    """
    packed = [source for source in sources if source.is_parquet]
    if packed:
        raise ConfigurationError(f"{packed[0]} is Parquet already")
    columns = schema.full_columns()
    reader = " UNION ALL ".join(_reader(source, columns) for source in sources)
    whole = "WHERE event IS NOT NULL AND ts IS NOT NULL"
    copy = f"COPY (FROM ({reader}) {whole}) TO {duck.quoted(path)} (FORMAT parquet, COMPRESSION zstd)"
    with duck.connect(spill=path.absolute().parent) as connection, duck.reading(path):
        connection.execute(copy)
        rows = connection.execute(f"SELECT count(*) FROM {duck.quoted(path)}").fetchone()  # noqa: S608  quoted
        total = connection.execute(f"SELECT count(*) FROM ({reader})").fetchone()  # noqa: S608  quoted
    written, read = int(rows[0]) if rows else 0, int(total[0]) if total else 0
    return Converted(path, written, read - written)


def _reader(source: Source, columns: dict[str, str]) -> str:
    return (
        f"FROM read_json({duck.quoted(source.path)}, format = 'newline_delimited', "
        f"compression = '{source.compression}', ignore_errors = true, columns = {duck.struct(columns)})"
    )
