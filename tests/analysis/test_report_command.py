from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lifecycle.cli import main
from lifecycle.cli.report import beside
from tests.analysis.conftest import Lines
from tests.analysis.faults import broken_chain, delivered_twice

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line as the console script does; returns status, stdout and stderr."""

    def run_command(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run_command


def test_the_report_is_printed(run: Run, run_log: Path) -> None:
    """Without options the tables go to the terminal, and the status is 0."""
    status, out, _ = run("report", run_log)
    assert status == 0
    assert "Rollouts" in out
    head = out.partition("Rollouts")[0]  # long paths wrap
    assert "rollouts" in head


def test_the_report_as_json_has_the_documented_sections(run: Run, run_log: Path) -> None:
    """`--json` prints one object, whose sections are those of docs/logs.md."""
    status, out, _ = run("report", run_log, "--json", "--strict")
    report = json.loads(out)
    assert status == 0
    assert report["schema"] == 1
    assert report["conformance"] == {"violations": 0, "first": []}
    documented = Path(__file__).parents[2].joinpath("docs", "logs.md").read_text()
    for section in report:
        assert f"| `{section}` |" in documented, section


def test_strict_exits_with_3_and_says_where(run: Run, good_lines: Lines, write: Callable[..., Path]) -> None:
    """Violations go to stderr with file and line, a verdict ends them, and the status is 3."""
    lines = copy.deepcopy(good_lines)
    places = [broken_chain(lines), delivered_twice(lines)]
    path = write(lines)
    status, out, err = run("report", path, "--strict")
    assert status == 3
    assert f"{path}:{places[0] + 1}: broken_chain: rollout " in err
    assert "2 violations: 1 x broken_chain, 1 x delivered_twice" in err
    assert "Violations" in out
    status, out, _ = run("report", path, "--strict", "--json")
    assert status == 3
    assert {found["kind"] for found in json.loads(out)["conformance"]["first"]} == {
        "broken_chain",
        "delivered_twice",
    }
    assert run("report", path)[0] == 0


def test_the_page_has_the_machines_with_counts_on_them(run: Run, run_log: Path, tmp_path: Path) -> None:
    """`--html` draws both machines from the table in the log, with what happened on their arcs."""
    status, _, err = run("report", run_log, "--html", tmp_path / "r.html", "--trace", tmp_path / "t.json")
    assert status == 0
    assert f"wrote {tmp_path / 'r.html'}" in err
    text = (tmp_path / "r.html").read_text()
    assert text.count('<div class="machine') == 2
    dispatched = run_log.read_text().count(
        '"trigger":"dispatch","source":"pending","dest":"streaming","tokens"'
    )
    assert f"{dispatched:,}" in text
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["report", "missing.jsonl"], "no such log: missing.jsonl"),
        (["report"], "Missing argument"),
        (["log", "replay", "nobody", "LOG"], "no line of a rollout 'nobody'"),
        (["log", "to-parquet", "LOG", "--out", "nowhere/x.parquet"], "nowhere/x.parquet"),
        (["report", "LOG", "--memory", "lots"], "'lots' is not a size"),
        (
            ["report", "LOG", "--trace", "nowhere/t.json"],
            "cannot write the trace nowhere/t.json: No such file",
        ),
    ],
)
def test_bad_input_is_status_2_without_a_traceback(
    run: Run, arguments: list[str], problem: str, run_log: Path
) -> None:
    """The message says what is wrong."""
    status, _, err = run(*[run_log if argument == "LOG" else argument for argument in arguments])
    assert status == 2
    assert problem in err
    assert "Traceback" not in err


def test_time_lines_are_written_whole_though_the_report_fails(
    run: Run, run_log: Path, tmp_path: Path
) -> None:
    """They are made beside the report and need none of it."""
    wanted = tmp_path / "t.json"
    assert run("report", run_log, "--memory", "lots", "--trace", wanted)[0] == 2
    assert json.loads(wanted.read_text())["traceEvents"]


def test_an_interrupt_does_not_wait_for_what_is_made_beside() -> None:
    """Ctrl-C ends the block at once; the error of the work comes with its result."""
    never = threading.Event()
    with pytest.raises(KeyboardInterrupt), beside(never.wait):
        raise KeyboardInterrupt
    never.set()
    with pytest.raises(ZeroDivisionError), beside(lambda: 1 // 0) as done:
        done.result()


def test_without_the_extra_the_command_says_what_to_install(
    run: Run, run_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing database is status 2 and an install command."""
    monkeypatch.setitem(sys.modules, "duckdb", None)
    status, _, err = run("report", run_log)
    assert status == 2
    assert "pip install 'rollout-lifecycle[analysis]'" in err


def test_replay_tells_the_story(run: Run, run_log: Path, good_lines: Lines) -> None:
    """`log replay` prints one sentence a line, with places if asked."""
    rollout = next(line["rollout_id"] for line in good_lines if line.get("trigger") == "finish")
    status, out, _ = run("log", "replay", rollout, run_log, "--places")
    assert status == 0
    assert "the server finished it" in out
    assert f"[{run_log}:" in out


def test_to_parquet_writes_a_file_that_the_report_reads(run: Run, run_log: Path, tmp_path: Path) -> None:
    """The Parquet file is far smaller, and says the same."""
    status, out, _ = run("log", "to-parquet", run_log, "--out", tmp_path / "log.parquet")
    assert status == 0
    assert "rows" in out
    assert (tmp_path / "log.parquet").stat().st_size < run_log.stat().st_size / 5
    plain = json.loads(run("report", run_log, "--json")[1])
    packed = json.loads(run("report", tmp_path / "log.parquet", "--json", "--strict")[1])
    assert packed["tokens"] == plain["tokens"]
    assert packed["conformance"]["violations"] == 0


def test_damaged_lines_are_said_when_converting(run: Run, run_log: Path, tmp_path: Path) -> None:
    """What cannot become a row is counted."""
    path = tmp_path / "torn.jsonl"
    path.write_bytes(run_log.read_bytes()[:-50])
    status, _, err = run("log", "to-parquet", path, "-o", tmp_path / "log.parquet")
    assert status == 0
    assert "1 damaged lines were left out" in err
