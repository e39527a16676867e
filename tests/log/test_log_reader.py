"""Reading logs back: typed records, damaged lines counted and never fatal."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest

from lifecycle.errors import ConfigurationError
from lifecycle.log import Damaged, LogLine, read_log
from lifecycle.log.records import BackendRecovered

GOOD = (
    b'{"event":"backend.recovered","v":1,"ts":1.0,"run_id":"r","process_id":"p","step":null,"outage_s":2.5}\n'
)


def test_lines_come_back_as_records(tmp_path: Path) -> None:
    """With the path and the number of the line; unknown keys of later versions are passed over."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD.replace(b'"step"', b'"new":1,"step"'))
    lines = list(read_log(path))
    assert [line.line for line in lines] == [1, 3]
    assert all(isinstance(line, LogLine) and isinstance(line.record, BackendRecovered) for line in lines)
    assert lines[0].path == str(path)


@pytest.mark.parametrize(
    "bad",
    [
        b'{"event":"backend.recovered","v":1',
        b"\xff\xfe garbage",
        b'{"event":"nobody.knows","v":1}',
        b'{"v":1}',
        b"[]",
        GOOD.strip().replace(b"2.5", b'"long"'),
    ],
)
def test_damaged_lines_are_what_they_are(tmp_path: Path, bad: bytes) -> None:
    """The others are read all the same."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(GOOD + bad + b"\n" + GOOD)
    kinds = [type(line) for line in read_log(path)]
    assert kinds == [LogLine, Damaged, LogLine]
    damaged = next(line for line in read_log(path) if isinstance(line, Damaged))
    assert damaged.line == 2
    assert damaged.problem


def test_compressed_logs_are_read(tmp_path: Path) -> None:
    """Gzip and zstandard, by the name of the file."""
    zstandard = pytest.importorskip("zstandard")
    zipped, packed = tmp_path / "log.jsonl.gz", tmp_path / "log.jsonl.zst"
    zipped.write_bytes(gzip.compress(GOOD * 2))
    packed.write_bytes(zstandard.compress(GOOD * 3))
    assert len(list(read_log(zipped))) == 2
    assert len(list(read_log(packed))) == 3


def test_a_compressed_log_that_is_cut_off_is_read_so_far(tmp_path: Path) -> None:
    """The rest is one damaged line."""
    pytest.importorskip("zstandard")
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD * 100)[:-12])
    lines = list(read_log(path))
    assert isinstance(lines[0], LogLine)
    assert isinstance(lines[-1], Damaged)
    assert "cannot be read on" in lines[-1].problem
    garbage = tmp_path / "log.jsonl.zst"
    garbage.write_bytes(b"not zstandard")
    assert [type(line) for line in read_log(garbage)] == [Damaged]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "log.jsonl.zst"
    path.write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"pip install 'rollout-lifecycle\[analysis\]'"):
        list(read_log(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """ConfigurationError with the path and why."""
    with pytest.raises(ConfigurationError, match=r"cannot read the log .*nothing: No such file"):
        list(read_log(tmp_path / "nothing"))
