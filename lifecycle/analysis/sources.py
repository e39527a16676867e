"""Which files a reader was given: paths, globs and directories, in the order in which they were begun."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lifecycle.errors import ConfigurationError

LINE_SUFFIXES: Final = (".jsonl", ".ndjson", ".json", ".log")
COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}
LOGS_IN_A_DIRECTORY: Final = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst")
SAMPLES_BESIDE_THE_LOG: Final = ("samples", "prompts")


@dataclass(frozen=True, slots=True)
class Source:
    """One file of log lines. `compression` is in DuckDB's words, or `parquet`."""

    path: Path
    compression: str

    @property
    def is_parquet(self) -> bool:
        """Whether it holds rows and not lines."""
        return self.compression == "parquet"

    def __str__(self) -> str:
        return str(self.path)


def find_sources(arguments: Iterable[str | Path]) -> list[Source]:
    """Expand paths, globs and directories into log files, each once.

    A directory stands for the `*.jsonl` in it (also `.gz`, `.zst`) that hold log lines. Raises ConfigurationError
    that names the argument when nothing is there, or when it is not a log.
    """
    found: dict[Path, Source] = {}
    for argument in arguments:
        for path in _expand(str(argument)):
            found.setdefault(path.resolve(), _source_of(path))
    if not found:
        raise ConfigurationError("no log was named: give one or more files, globs or directories")
    return list(found.values())


def _expand(argument: str) -> Sequence[Path]:
    path = Path(argument)
    if path.is_dir():
        inside = sorted(entry for pattern in LOGS_IN_A_DIRECTORY for entry in path.glob(pattern))
        logs = [entry for entry in inside if not entry.name.startswith(SAMPLES_BESIDE_THE_LOG)]
        if not logs:
            raise ConfigurationError(
                f"no log in the directory {argument}: looked for *.jsonl, .jsonl.gz, .jsonl.zst"
            )
        return logs
    if path.is_file():
        return [path]
    matches = [Path(match) for match in sorted(glob.glob(argument, recursive=True))]  # noqa: PTH207  absolute globs too
    files = [match for match in matches if match.is_file()]
    if not files:
        what = "nothing matches" if glob.has_magic(argument) else "no such log:"
        raise ConfigurationError(f"{what} {argument}")
    return files


def _source_of(path: Path) -> Source:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return Source(path, "parquet")
    inner = Path(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix
    if inner not in LINE_SUFFIXES and inner:
        known = ", ".join((*LINE_SUFFIXES, ".parquet"))
        raise ConfigurationError(
            f"{path} is not a log by its name: known are {known}, and .gz or .zst after them"
        )
    return Source(path, COMPRESSIONS.get(suffix, "uncompressed"))
