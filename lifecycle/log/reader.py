"""The one reader of the log in Python: typed records, and damaged lines as what they are."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import msgspec

from lifecycle.errors import ConfigurationError
from lifecycle.log.records import AnyRecord

_DECODER = msgspec.json.Decoder(AnyRecord)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A record with the place it was read from; `line` counts from 1."""

    path: str
    line: int
    record: AnyRecord


@dataclass(frozen=True, slots=True)
class Damaged:
    """A line that is not a record: torn, garbage, or of an event this version does not know."""

    path: str
    line: int
    problem: str


def read_log(path: str | os.PathLike[str]) -> Iterator[LogLine | Damaged]:
    """Read one log file (`.gz` and `.zst` too), line by line, never failing on a damaged line.

    Raises ConfigurationError when the file cannot be opened, or needs a package that is not installed.
    """
    name, number = os.fspath(path), 0
    with _open(Path(path)) as file:
        lines = iter(file)
        while True:
            number += 1
            try:
                line = next(lines, None)
            except Exception as error:  # noqa: BLE001  each compression has its own; what follows cannot be read
                yield Damaged(name, number, f"the file cannot be read on: {error}")
                return
            if line is None:
                return
            if not line.strip():
                continue
            try:
                yield LogLine(name, number, _DECODER.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                yield Damaged(name, number, str(error))


def _open(path: Path) -> AbstractContextManager[IO[bytes]]:
    try:
        if path.suffix == ".gz":
            return cast("AbstractContextManager[IO[bytes]]", gzip.open(path, "rb"))
        if path.suffix == ".zst":
            return _open_zst(path)
        return path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"cannot read the log {path}: {error.strerror}") from error


def _open_zst(path: Path) -> AbstractContextManager[IO[bytes]]:
    try:
        import zstandard  # noqa: PLC0415  an extra
    except ImportError as error:
        raise ConfigurationError(
            f"{path} needs the analysis extra: pip install 'rollout-lifecycle[analysis]'"
        ) from error
    return cast("AbstractContextManager[IO[bytes]]", io.BufferedReader(zstandard.open(path, "rb")))
