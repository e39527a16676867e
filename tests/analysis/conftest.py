from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.generate_log import write_log

Lines = list[dict[str, Any]]


@pytest.fixture(scope="session")
def run_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of one run in one file: several processes, two of them crashed, the last one closed."""
    path = tmp_path_factory.mktemp("logs") / "run.jsonl"
    write_log(path, 6000, seed=11, groups_per_step=8, crash_every=5, restart_every=4)
    return path


@pytest.fixture(scope="session")
def split_log(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same run with one file per process."""
    path = tmp_path_factory.mktemp("split") / "run.jsonl"
    return write_log(path, 6000, seed=11, split=True, groups_per_step=8, crash_every=5, restart_every=4)


@pytest.fixture(scope="session")
def good_lines(run_log: Path) -> Lines:
    """The lines of `run_log`, decoded; not to be changed."""
    return [json.loads(line) for line in run_log.read_text().splitlines()]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write lines (dicts, or text as it is) to a file."""

    def write_lines(lines: Iterable[dict[str, Any] | str], name: str = "log.jsonl") -> Path:
        path = tmp_path / name
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return path

    return write_lines
