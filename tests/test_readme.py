from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from adapters.sglang.simulator import SimulatedCluster
from lifecycle.log import LogLine, read_log
from lifecycle.log.records import RolloutTransition, columns

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [body for name, body in fences if name == language]


def test_the_example_runs_as_it_stands(tmp_path: Path) -> None:
    """Copied out and pointed at a server, it delivers its target and leaves a log and a store."""
    (example,) = blocks("python")
    assert len(example.strip().splitlines()) <= 16
    with SimulatedCluster(mode="incremental", tokens_per_second=200) as cluster:
        script = tmp_path / "example.py"
        script.write_text(example.replace("http://127.0.0.1:30000", cluster.urls[0]))
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8 groups delivered, 4 carried to the next call\n"
    assert any(
        isinstance(line, LogLine) and isinstance(line.record, RolloutTransition)
        for line in read_log(tmp_path / "lifecycle.jsonl")
    )
    assert (tmp_path / "run.db").exists()


def test_the_log_lines_shown_are_lines_of_this_schema() -> None:
    """Every key shown is one that the log has."""
    shown = [json.loads(line) for block in blocks("") for line in block.splitlines() if line.startswith("{")]
    assert len(shown) == 3
    assert all(set(line) <= set(columns()) for line in shown)
    assert [(line["source"], line["dest"]) for line in shown] == [
        ("streaming", "partial"),
        ("partial", "aborting"),
        ("aborting", "aborted"),
    ]


def test_every_file_it_points_to_is_there() -> None:
    """No dead links, here and in CONTRIBUTING.md."""
    for page in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page):
            assert (ROOT / target).exists(), target
