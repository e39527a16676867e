"""DuckDB, opened the way this package wants it, and the SQL files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from lifecycle.analysis.lines import missing_extra
from lifecycle.errors import ConfigurationError

if TYPE_CHECKING:
    import duckdb

_MODE = {name: re.compile(rf"^(\s*)--{name} ", re.MULTILINE) for name in ("strict", "default")}
_COMMENT = re.compile(r"^\s*--.*\n", re.MULTILINE)
INTERRUPTED: Final = "Query interrupted"
"""What DuckDB says when a signal ends a query (seen in 2.0.1)."""


class Database:
    """A connection whose work Ctrl-C ends with KeyboardInterrupt; of itself it says RuntimeError, as of a fault."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def execute(self, query: str, parameters: Sequence[Any] | None = None) -> Self:
        """Run a query; its rows are fetched from what is returned, before the next one."""
        with _interruptible():
            self._connection.execute(query, parameters)
        return self

    @property
    def columns(self) -> list[str]:
        """The names of the columns of the last query."""
        return [column[0] for column in self._connection.description or ()]

    def fetchall(self) -> list[tuple[Any, ...]]:
        """All rows that are left of the last query: they may be computed only now."""
        with _interruptible():
            return self._connection.fetchall()

    def fetchmany(self, size: int) -> list[tuple[Any, ...]]:
        """The next `size` rows."""
        with _interruptible():
            return self._connection.fetchmany(size)

    def fetchone(self) -> tuple[Any, ...] | None:
        """The next row."""
        with _interruptible():
            return self._connection.fetchone()

    def close(self) -> None:
        """Forget everything."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if str(error) == INTERRUPTED:
            raise KeyboardInterrupt from error
        raise


def connect(*, memory: str = "400MB", threads: int | None = None, spill: Path | None = None) -> Database:
    """A database in memory, with a bound, that goes to `spill` when it needs more and never to the network."""
    try:
        import duckdb  # noqa: PLC0415  an extra
    except ImportError as error:
        raise missing_extra("reading logs") from error
    settings: dict[str, Any] = {
        "memory_limit": memory,
        "preserve_insertion_order": "true",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
    }
    if threads is not None:
        settings["threads"] = str(threads)
    settings["temp_directory"] = "" if spill is None else str(spill)
    try:
        return Database(duckdb.connect(":memory:", config=settings))
    except Exception as error:
        raise ConfigurationError(f"memory {memory!r} is not a size such as 500MB or 2GB") from error


@contextmanager
def reading(source: object) -> Iterator[None]:
    """Turn the database's complaint about a file into ConfigurationError with the name of the file."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        if kind == "OutOfMemoryException":
            raise ConfigurationError(
                f"reading {source} needs more memory than it was given; give more with --memory"
            ) from error
        if kind not in {"IOException", "InvalidInputException"}:
            raise
        raise ConfigurationError(f"cannot read the log {source}: {str(error).splitlines()[0]}") from error


@cache
def _text(name: str) -> str:
    return files("lifecycle.analysis").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


def sql(name: str, *, strict: bool = False, **parts: str) -> str:
    """The query of that name; lines that begin with `--strict` or `--default` belong to it in that mode only.

    `parts` replace `{name}` in it.
    """
    text = _MODE["strict" if strict else "default"].sub(r"\1", _text(name))
    text = _COMMENT.sub("", text)
    for part, value in parts.items():
        text = text.replace("{" + part + "}", value)
    return text


def quoted(value: object) -> str:
    """A string literal."""
    return "'" + str(value).replace("'", "''") + "'"


def struct(columns: Mapping[str, str]) -> str:
    """A struct literal of names and types, as `read_json` wants its columns."""
    return "{" + ", ".join(f"{name}: {quoted(kind)}" for name, kind in columns.items()) + "}"
