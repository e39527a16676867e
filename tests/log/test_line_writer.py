"""The file of lines: whole lines only, one writer, a torn tail repaired."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from lifecycle.errors import ConfigurationError
from lifecycle.log import writer as module
from lifecycle.log.writer import BUFFER_BYTES, LineWriter


def test_lines_reach_the_file_at_a_flush(tmp_path: Path) -> None:
    """Not before, and each with its newline."""
    path = tmp_path / "deep" / "log.jsonl"
    writer = LineWriter(path)
    writer.write(b"one")
    assert path.read_bytes() == b""
    writer.write(b"two")
    writer.flush()
    assert path.read_bytes() == b"one\ntwo\n"
    writer.close()


def test_a_full_buffer_is_written_by_itself(tmp_path: Path) -> None:
    """256 KiB at most are kept back."""
    path = tmp_path / "log"
    writer = LineWriter(path)
    writer.write(b"x" * BUFFER_BYTES)
    assert path.stat().st_size == BUFFER_BYTES + 1
    writer.close()


def test_closing_flushes_and_later_lines_go_nowhere(tmp_path: Path) -> None:
    """Twice is once."""
    path = tmp_path / "log"
    writer = LineWriter(path)
    writer.write(b"one")
    writer.close()
    writer.close()
    writer.write(b"late")
    writer.flush()
    assert path.read_bytes() == b"one\n"


@pytest.mark.parametrize(
    ("before", "kept", "cut"),
    [
        (b"", b"", 0),
        (b"whole\n", b"whole\n", 0),
        (b"whole\ntor", b"whole\n", 3),
        (b"no newline at all", b"", 17),
        (b"whole\n" + b"y" * 200_000, b"whole\n", 200_000),
    ],
)
def test_a_torn_tail_is_cut_off(tmp_path: Path, before: bytes, kept: bytes, cut: int) -> None:
    """What a dead process left behind the last newline; the writer goes on after it."""
    path = tmp_path / "log"
    path.write_bytes(before)
    writer = LineWriter(path)
    assert writer.repaired == cut
    writer.write(b"next")
    writer.close()
    assert path.read_bytes() == kept + b"next\n"


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """In this process and in another one, until the first has closed."""
    path = tmp_path / "log"
    first = LineWriter(path)
    with pytest.raises(ConfigurationError, match="is being written by another process"):
        LineWriter(path)
    script = f"from lifecycle.log import LineWriter; LineWriter({str(path)!r})"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "is being written by another process" in other.stderr
    first.close()
    LineWriter(path).close()


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A directory, or below a file."""
    with pytest.raises(ConfigurationError, match=f"cannot write the log {tmp_path}: Is a directory"):
        LineWriter(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="cannot write the log"):
        LineWriter(tmp_path / "file" / "log")


def test_a_write_that_fails_half_way_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had been written is not written again when the disk has room."""
    path, real = tmp_path / "log", os.write
    writer = LineWriter(path)
    answers = iter([3, OSError(errno.ENOSPC, "full")])

    def stingy(fd: int, data: bytes) -> int:
        answer = next(answers, None)
        if isinstance(answer, OSError):
            raise answer
        return real(fd, data if answer is None else data[:answer])

    monkeypatch.setattr(module.os, "write", stingy)
    writer.write(b"abcdef")
    with pytest.raises(OSError, match="full"):
        writer.flush()
    writer.flush()
    writer.close()
    assert path.read_bytes() == b"abcdef\n"


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    """Two threads, and flushes in between."""
    path = tmp_path / "log"
    writer = LineWriter(path)

    def work(letter: bytes) -> None:
        for _ in range(500):
            writer.write(letter * 50)
            writer.flush()

    threads = [Thread(target=work, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    lines = path.read_bytes().splitlines()
    assert len(lines) == 1000
    assert {line[:1] * 50 for line in lines} == set(lines)
