"""The lines of a log file themselves: the n-th one, or all of them. No database.

DuckDB numbers the lines that are not blank; an editor numbers all of them. `pick` translates, and `LineFinder` does
so again and again in a long file.
"""

from __future__ import annotations

import gzip
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import IO, Any, Final, cast

import msgspec

from lifecycle.analysis.sources import Source
from lifecycle.errors import ConfigurationError
from lifecycle.log.records import RECORD_TYPES, event_name

CHUNK: Final = 4 * 1024 * 1024
EARLY: Final = 8
"""Lines in the first part of so many are found faster by reading up to them than by counting all newlines."""
INSTALL: Final = "pip install 'rollout-lifecycle[analysis]'"
_BLANK = re.compile(rb"\n[ \t\r]*\n")


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line: `number` as an editor counts, from 1 (in Parquet: of the row); `text` without its newline."""

    number: int
    text: bytes


def missing_extra(what: str) -> ConfigurationError:
    """The error for a package that is not installed: what needs it, and the command that helps."""
    return ConfigurationError(f"{what} needs the analysis extra: {INSTALL}")


def open_source(source: Source) -> AbstractContextManager[IO[bytes]]:
    """The bytes of a file of lines, decompressed. Raises ConfigurationError when it cannot be opened."""
    try:
        if source.compression == "gzip":
            return cast("AbstractContextManager[IO[bytes]]", gzip.open(source.path, "rb"))
        if source.compression == "zstd":
            try:
                import zstandard  # noqa: PLC0415  an extra
            except ImportError as error:
                raise missing_extra(str(source)) from error
            return cast("AbstractContextManager[IO[bytes]]", zstandard.open(source.path, "rb"))
        return source.path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"cannot read the log {source}: {error.strerror}") from error


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Pieces that end with a newline, but for the last; a compressed file that is cut off ends early."""
    rest = b""
    read = getattr(file, "read1", file.read)  # gives what there is before a file is found to be cut off
    while True:
        try:
            data = read(CHUNK)
        except (EOFError, OSError, zlib.error):
            data = b""
        if not data:
            break
        cut = data.rfind(b"\n") + 1
        if cut:
            yield rest + data[:cut]
            rest = data[cut:]
        else:
            rest += data
    if rest:
        yield rest


def each_line(source: Source, needle: bytes = b"") -> Iterator[RawLine]:
    """Every line that is not blank, or only those in which the bytes of `needle` occur."""
    if source.is_parquet:
        yield from _parquet_lines(source, None, needle)
        return
    with open_source(source) as file:
        number = 0
        for chunk in _chunks(file):
            if needle and needle not in chunk:
                number += chunk.count(b"\n")
                continue
            for text in _split(chunk):
                number += 1
                if needle in text and text.strip():
                    yield RawLine(number, text)


def each_text(source: Source) -> Iterator[bytes]:
    """The text of every line, blank ones too: for who reads a long file and asks for no place in it."""
    if source.is_parquet:
        yield from (line.text for line in _parquet_lines(source, None, b""))
        return
    with open_source(source) as file:
        for chunk in _chunks(file):
            yield from _split(chunk)


def _split(chunk: bytes) -> list[bytes]:
    return chunk.split(b"\n")[: -1 if chunk.endswith(b"\n") else None]


def pick(source: Source, ordinals: Sequence[int]) -> dict[int, RawLine]:
    """The lines with these ordinals, which count from 0 and leave blank lines out. Stops at the last one wanted."""
    wanted = sorted(set(ordinals))
    if source.is_parquet:
        rows = _parquet_lines(source, wanted, b"")
        return {line.number - 1: line for line in rows}
    found: dict[int, RawLine] = {}
    ordinal = number = 0  # of the first line of the chunk: without and with blank lines
    with open_source(source) as file:
        for chunk in _chunks(file):
            if len(found) == len(wanted):
                break
            blank = chunk[:1] in b"\n\r \t" or _BLANK.search(chunk) is not None
            lines = chunk.count(b"\n") + (not chunk.endswith(b"\n"))
            upto = wanted[len(found)]
            if not blank and upto >= ordinal + lines:
                ordinal, number = ordinal + lines, number + lines
                continue
            for text in _split(chunk):
                number += 1
                if not text.strip():
                    continue
                if len(found) < len(wanted) and wanted[len(found)] == ordinal:
                    found[ordinal] = RawLine(number, text)
                ordinal += 1
    return found


class LineFinder:
    """The lines of one source by ordinal, as `pick` gives them, for who asks more than once.

    `rows` says how many lines of it are not blank. A late line in a plain file is looked up: its newlines are
    counted once, and where there are as many lines as rows, none is blank and the n-th line is the n-th row.
    """

    def __init__(self, source: Source, rows: int) -> None:
        self._source = source
        self.rows = rows
        # How many there are before each piece of CHUNK bytes, and in all.
        self._newlines: list[int] | None = None

    def pick(self, ordinals: Sequence[int]) -> dict[int, RawLine]:
        """The lines with these ordinals, which count from 0 and leave blank lines out."""
        early = max(ordinals, default=0) < self.rows // EARLY
        if early or self._source.compression != "uncompressed":
            return pick(self._source, ordinals)
        with open_source(self._source) as file:
            if self._newlines is None:
                self._newlines = _count_newlines(file)
            if self._newlines[-1] != self.rows:
                return pick(self._source, ordinals)
            return dict(self._read(file, self._newlines, sorted(ordinals)))

    def _read(
        self, file: IO[bytes], newlines: list[int], ordinals: Sequence[int]
    ) -> Iterator[tuple[int, RawLine]]:
        """The lines behind so many newlines; each piece is read once."""
        for piece, wanted in groupby(ordinals, lambda ordinal: max(bisect_left(newlines, ordinal) - 1, 0)):
            file.seek(piece * CHUNK)
            lines = (file.read(CHUNK) + file.readline()).split(b"\n")
            for ordinal in wanted:
                yield ordinal, RawLine(ordinal + 1, lines[ordinal - newlines[piece]])


def _count_newlines(file: IO[bytes]) -> list[int]:
    """The newlines before each piece, and in all; a last line without one has it, too."""
    counts = [0]
    data = last = b""
    while data := file.read(CHUNK):
        counts.append(counts[-1] + data.count(b"\n"))
        last = data
    if last and not last.endswith(b"\n"):
        counts[-1] += 1
    return counts


def _parquet_lines(source: Source, wanted: Sequence[int] | None, needle: bytes) -> Iterator[RawLine]:
    """Rows of a Parquet file as the lines they were made from."""
    from lifecycle.analysis.duck import connect, quoted, reading  # noqa: PLC0415  only here a database is needed

    connection = connect()
    parquet = f"read_parquet({quoted(source.path)}, file_row_number = true)"
    where = "" if wanted is None else "WHERE list_contains($1::BIGINT[], file_row_number)"
    query = f"SELECT * FROM {parquet} {where}"  # noqa: S608  a quoted path
    with reading(source):
        cursor = connection.execute(query, None if wanted is None else [list(wanted)])
    names = cursor.columns
    while rows := cursor.fetchmany(10_000):
        for row in rows:
            values: dict[str, Any] = dict(zip(names, row, strict=True))
            number = int(values.pop("file_row_number")) + 1
            text = msgspec.json.encode(_unpacked(values))
            if needle in text:
                yield RawLine(number, text)


JSON_COLUMNS: Final = frozenset({"tables", "settings", "ledger", "states", "spans"})
"""Columns that hold JSON text in Parquet, because their shape differs from line to line."""


KEYS: Final = {
    event_name(record_type): {"event", *(field.encode_name for field in msgspec.structs.fields(record_type))}
    for record_type in RECORD_TYPES
}
"""Which keys each event has: the columns of a Parquet file are those of all events."""


def _unpacked(values: dict[str, Any]) -> dict[str, Any]:
    keys = KEYS.get(values.get("event", ""), values.keys())
    return {
        name: msgspec.Raw(value.encode()) if name in JSON_COLUMNS and value is not None else value
        for name, value in values.items()
        if name in keys
    }
