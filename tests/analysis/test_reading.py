from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from io import StringIO
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lifecycle.analysis import (
    Warehouse,
    build_report,
    find_sources,
    find_violations,
    to_parquet,
    write_page,
    write_trace,
)
from lifecycle.analysis.lines import LineFinder, each_line, pick
from lifecycle.analysis.render import print_report
from lifecycle.analysis.sources import Source
from lifecycle.cli.report import draw_machines
from lifecycle.errors import ConfigurationError
from tests.analysis.conftest import Lines


def summary(*paths: Path | str) -> dict[str, Any]:
    """The report without what names files and lines."""
    with Warehouse(find_sources(paths)) as warehouse:
        report = build_report(warehouse).as_dict()
    return {
        key: value for key, value in report.items() if key not in {"source", "damage", "anomalies", "orphans"}
    }


def test_compressed_and_packed_logs_say_the_same(run_log: Path, tmp_path: Path) -> None:
    """Plain lines, gzip, zstandard and Parquet give one and the same report."""
    text = run_log.read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(text))
    written = to_parquet(find_sources([run_log]), tmp_path / "c.parquet")
    assert (written.rows, written.damaged) == (text.count(b"\n"), 0)
    plain = summary(run_log)
    for name in ("a.jsonl.gz", "b.jsonl.zst", "c.parquet"):
        assert summary(tmp_path / name) == plain, name


def test_the_order_of_the_files_does_not_matter(run_log: Path, split_log: list[Path]) -> None:
    """Files of several processes are read in the order in which they were begun."""
    assert summary(*reversed(split_log)) == summary(run_log)


def test_globs_directories_and_names_are_expanded_once(split_log: list[Path]) -> None:
    """A file that several arguments mean is read once; samples beside a log are not taken for one."""
    directory = split_log[0].parent
    (directory / "samples.jsonl").write_text("{}\n")
    found = [
        source.path for source in find_sources([str(directory / "run-*.jsonl"), directory, split_log[0]])
    ]
    assert sorted(found) == sorted(split_log)


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("nothing.jsonl", "no such log: nothing.jsonl"),
        ("nothing-*.jsonl", "nothing matches nothing-*.jsonl"),
        ("notes.txt", "notes.txt is not a log by its name"),
        ("empty", "no log in the directory empty"),
        ("text.parquet", "cannot read the log text.parquet"),
        ("samples.jsonl", "samples.jsonl is not a lifecycle log: not one of its 2 lines is a record"),
    ],
)
def test_what_is_no_log_is_refused_by_name(
    argument: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the argument and what is wrong with it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("hello\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "samples.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n')
    (tmp_path / "text.parquet").write_text("hello\n")
    with pytest.raises(ConfigurationError) as caught:
        Warehouse(find_sources([argument]))
    assert problem in str(caught.value)


DAMAGE = [
    '{"event":"rollout.tra',
    "garbage",
    "[1, 2]",
    "null",
    '{"event": 5}',
    "\x00\x00\x00",
    '{"event":"engine.stopped"}trailing',
]


def test_damaged_lines_are_counted_shown_and_never_data(
    good_lines: Lines, write: Callable[..., Path]
) -> None:
    """Torn lines, garbage and wrong types are named with file and line; the numbers stay those of the good lines."""
    text: list[str] = [json.dumps(line) for line in good_lines]
    places = [3 + 2 * index for index in range(len(DAMAGE))]
    for place, damaged in zip(places, DAMAGE, strict=True):
        text.insert(place, damaged)
    text.insert(30, "")
    text.insert(31, json.dumps({**good_lines[2], "tokens": "many"}))
    text.insert(40, json.dumps({**good_lines[2], "event": "rollout.dreamt"}))
    path = write(text)
    with Warehouse(find_sources([path])) as warehouse:
        report = build_report(warehouse).as_dict()
    damage = report["damage"]
    assert damage["lines"] == len(DAMAGE) + 1
    assert [shown["line"] for shown in damage["first"]] == [place + 1 for place in places] + [32]
    assert {shown["file"] for shown in damage["first"]} == {str(path)}
    assert "expected `int`" in damage["first"][-1]["problem"].lower()
    assert damage["unknown_events"] == {"rollout.dreamt": 1}
    clean = summary(write(good_lines, "clean.jsonl"))
    assert {key: value for key, value in report.items() if key in clean} == clean


MISSING = "missing"
BORDERS = [border + step for border in (2**8, 2**16, 2**31, 2**32, 2**63) for step in (-1, 0)]
WORDS = [MISSING, "oops", ""]
NUMBERS = [0, 7, -1, *BORDERS, 2**70, -1.5, 1e25, 1e39, 1e300, inf, -inf, nan]
OTHERS = [True, None, [1], ["a", None], {"a": 1}]
ODD_VALUES = pytest.mark.parametrize("odd", [*WORDS, *NUMBERS, *OTHERS], ids=repr)


def with_odd(line: dict[str, Any], key: str, odd: object) -> dict[str, Any]:
    """A line in which one key says something odd, or is missing."""
    rest = {name: value for name, value in line.items() if name != key}
    return rest if odd is MISSING else {**rest, key: odd}


@ODD_VALUES
def test_no_value_of_any_key_stops_a_report(
    odd: object, good_lines: Lines, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Every line says something odd, in one key after the other: the lines are damaged, or say something odd."""
    lines = []
    for number, line in enumerate(good_lines):
        keys = sorted(set(line) - {"event"})
        lines.append(with_odd(line, keys[number * 7 % len(keys)], odd))
    sources = find_sources([write(lines)])
    with Warehouse(sources, strict=True) as warehouse:
        find_violations(warehouse)
    with Warehouse(sources) as warehouse:
        report = build_report(warehouse)
        assert warehouse.total == len(lines)
    json.dumps(report.as_dict(), allow_nan=False)
    drawings = draw_machines(report) if odd == "oops" else {}  # only words are drawn
    write_page(report, tmp_path / "page.html", drawings=drawings)
    print_report(report, Console(file=StringIO()))
    write_trace(sources, tmp_path / "trace.json")
    json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)


@ODD_VALUES
def test_odd_lines_behind_a_good_log_leave_it_as_it_is(
    odd: object, good_lines: Lines, write: Callable[..., Path]
) -> None:
    """A line of every event for each of its keys: no rollout of the others is lost, whatever is said of them."""
    kinds = {line["event"]: line for line in good_lines}
    assert len(kinds) > 10
    behind = [with_odd(line, key, odd) for line in kinds.values() for key in line if key != "event"]
    with Warehouse(find_sources([write([*good_lines, *behind])]), strict=True) as warehouse:
        report = build_report(warehouse, find_violations(warehouse))
        assert warehouse.total == len(good_lines) + len(behind)
    assert report["rollouts"]["total"] >= len(
        {line["rollout_id"] for line in good_lines if "rollout_id" in line and "seq" in line}
    )


def test_a_torn_tail_is_one_damaged_line(run_log: Path, tmp_path: Path) -> None:
    """A process that died in the middle of a write leaves one line that is left out."""
    path = tmp_path / "torn.jsonl"
    path.write_bytes(run_log.read_bytes()[:-100])
    with Warehouse(find_sources([path])) as warehouse:
        assert warehouse.damage.count == 1
        assert warehouse.damage.first[0].place.line == run_log.read_bytes().count(b"\n")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_log_that_was_cut_off_is_read_as_far_as_it_goes(
    suffix: str, run_log: Path, tmp_path: Path
) -> None:
    """What can be unpacked is read, and the file is named."""
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    packed = pack(run_log.read_bytes())
    path = tmp_path / f"cut.jsonl{suffix}"
    path.write_bytes(packed[: len(packed) * 2 // 3])
    with Warehouse(find_sources([path])) as warehouse:
        report = build_report(warehouse)
    assert 1000 < report["source"]["lines"] < run_log.read_bytes().count(b"\n")
    assert report["damage"]["truncated_files"] == ([str(path)] if suffix == ".gz" else [])
    assert report["damage"]["lines"] <= 1


def test_an_empty_log_gives_an_empty_report(tmp_path: Path) -> None:
    """Nothing is a legal answer."""
    (tmp_path / "empty.jsonl").write_text("")
    with Warehouse(find_sources([tmp_path / "empty.jsonl"]), strict=True) as warehouse:
        report = build_report(warehouse, []).as_dict()
    assert report["rollouts"]["total"] == 0
    assert report["tokens"]["observed"] == 0


@pytest.mark.parametrize("blank", [[], [0], [5, 5, 6], [199]])
def test_the_nth_line_is_found_past_blank_ones(blank: list[int], write: Callable[..., Path]) -> None:
    """Ordinals leave blank lines out; numbers count them, as an editor does."""
    text = [str(number) for number in range(200)]
    for place in sorted(blank, reverse=True):
        text.insert(place, "  ")
    path = write(text)
    found = pick(find_sources([path])[0], [0, 7, 199])
    assert {ordinal: line.text for ordinal, line in found.items()} == {0: b"0", 7: b"7", 199: b"199"}
    assert [text[line.number - 1] for line in found.values()] == ["0", "7", "199"]


@given(
    lines=st.lists(st.sampled_from(["", " ", "a", "bb", "ccc" * 9]), max_size=40),
    ended=st.booleans(),
    chunk=st.integers(1, 50),
    data=st.data(),
)
def test_a_finder_finds_what_reading_from_the_start_finds(
    lines: list[str], ended: bool, chunk: int, data: st.DataObject
) -> None:
    """Early and late lines, with and without blank ones, whatever the pieces are in which the file is read."""
    rows = sum(bool(line.strip()) for line in lines)
    asked = st.lists(st.integers(0, max(rows - 1, 0)), min_size=1, max_size=5) if rows else st.just([])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "lines.jsonl"
        path.write_text("\n".join(lines) + ("\n" if ended and lines else ""))
        source = Source(path, "uncompressed")
        finder = LineFinder(source, rows)
        for _ in range(3):
            ordinals = data.draw(asked)
            whole = pick(source, ordinals)
            with patch.context() as small:
                small.setattr("lifecycle.analysis.lines.CHUNK", chunk)
                assert finder.pick(ordinals) == whole


def test_lines_with_a_word_are_found_across_chunks(run_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading by small pieces finds the same lines with the same numbers."""
    source = find_sources([run_log])[0]
    whole = [(line.number, line.text) for line in each_line(source, b"engine.st")]
    monkeypatch.setattr("lifecycle.analysis.lines.CHUNK", 1000)
    assert [(line.number, line.text) for line in each_line(source, b"engine.st")] == whole
    assert len(whole) > 5


def test_parquet_gives_the_lines_back(run_log: Path, tmp_path: Path) -> None:
    """Every line comes out of the Parquet file as it went in."""
    to_parquet(find_sources([run_log]), tmp_path / "log.parquet")
    back = [json.loads(line.text) for line in each_line(find_sources([tmp_path / "log.parquet"])[0])]
    assert back == [json.loads(line) for line in run_log.read_text().splitlines()]


def test_a_warehouse_leaves_no_files_behind(
    run_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory for what does not fit into memory is gone when it is closed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Warehouse(find_sources([run_log])):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_importing_the_package_brings_in_neither_a_database_nor_an_event_loop() -> None:
    """`import lifecycle.analysis` is cheap."""
    code = "import sys, lifecycle.analysis; print([m for m in ('duckdb', 'anyio', 'asyncio', 'httpx') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_missing_extra_is_named_with_the_command_that_helps(
    run_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without DuckDB the error says what to install."""
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rollout-lifecycle\[analysis\]'"):
        Warehouse(find_sources([run_log]))
