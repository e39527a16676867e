"""DuckDB, opened the way this package wants it, and the SQL files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lifecycle.analysis.lines import missing_extra

if TYPE_CHECKING:
    import duckdb

_STRICT = re.compile(r"^(\s*)--strict ", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*\n", re.MULTILINE)


def connect(
    *, memory: str = "400MB", threads: int | None = None, spill: Path | None = None
) -> duckdb.DuckDBPyConnection:
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
    return duckdb.connect(":memory:", config=settings)


@cache
def _text(name: str) -> str:
    return files("lifecycle.analysis").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


def sql(name: str, *, strict: bool = False, **parts: str) -> str:
    """The query of that name; with `strict` the lines that begin with `--strict` belong to it.

    `parts` replace `{name}` in it.
    """
    text = _text(name)
    if strict:
        text = _STRICT.sub(r"\1", text)
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
