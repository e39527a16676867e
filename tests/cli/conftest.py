"""Running the command as a user does: a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Finished = subprocess.CompletedProcess[str]


def lifecycle(*arguments: object, timeout: float = 55, **environment: str) -> Finished:
    """Run `lifecycle ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "lifecycle", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "200", **environment},
        check=False,
    )


def samples(directory: Path) -> dict[str, dict[str, Any]]:
    """`samples.jsonl` by id; fails on a sample that is there twice."""
    found: dict[str, dict[str, Any]] = {}
    for line in (directory / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert sample["id"] not in found, f"{sample['id']} was delivered twice"
        found[sample["id"]] = sample
    return found


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    """Write a prompts file; lines may be dicts or raw text."""

    def write(*lines: dict[str, Any] | str) -> Path:
        file = tmp_path / "prompts.jsonl"
        file.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return file

    return write
