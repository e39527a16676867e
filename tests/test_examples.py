from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import adapters.slime
from adapters.slime import Settings
from lifecycle.log import Damaged, read_log

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    """What an example prints; it must end well and complain about nothing."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_training_loop_accounts_for_every_step(tmp_path: Path) -> None:
    """Five full steps with weight updates, resumed partials, balanced books, and a log that can be read."""
    log = tmp_path / "lifecycle.jsonl"
    out = run("train_loop.py", str(log))
    assert re.findall(r"step (\d): 8 groups of 4", out) == ["1", "2", "3", "4", "5"]
    assert re.search(r"[1-9]\d* samples resumed, [1-9]\d* of mixed weights", out)
    assert "balanced: True" in out
    assert not [line for line in read_log(log) if isinstance(line, Damaged)]


def test_plain_code_needs_no_async() -> None:
    """The synchronous example aborts, goes on and updates weights."""
    out = run("sync_loop.py")
    assert "one: completed, 40 tokens" in out
    assert "still partial after half a second" in out
    assert re.search(r"aborted 8: .*, 8 with tokens to go on from", out)
    assert re.search(r"many-0: \d+ tokens, 300 after going on: completed", out)
    assert "weights may change now: 0 requests in flight" in out
    assert "books balanced: True" in out


def test_the_flags_for_slime_name_what_exists(tmp_path: Path) -> None:
    """Every path is an attribute of the adapter, every YAML key a setting, and the shell takes the file."""
    text = (EXAMPLES / "slime_flags.sh").read_text()
    for path in re.findall(r"adapters\.slime\.(\w+)", text):
        assert path in adapters.slime.__all__
    done = subprocess.run(
        ["bash", "-c", f'source {EXAMPLES / "slime_flags.sh"}; printf "%s\\n" "${{LIFECYCLE_ARGS[@]}}"'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[:2] == ["--rollout-function-path", "adapters.slime.generate_rollout"]
    lines = (tmp_path / "lifecycle.yaml").read_text().splitlines()
    keys = {line.partition(":")[0] for line in lines}
    assert keys
    assert keys <= {f"lifecycle_{field.name}" for field in fields(Settings)}


@pytest.mark.parametrize("name", ["train_loop.py", "sync_loop.py"])
def test_examples_are_short(name: str) -> None:
    """Something a user would copy fits in one's head."""
    assert len((EXAMPLES / name).read_text().splitlines()) <= 110
