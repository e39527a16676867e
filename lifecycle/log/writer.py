"""A buffered file of lines with one writer at a time, whose end is always a whole line."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from threading import Lock
from typing import Final

from lifecycle.errors import ConfigurationError

BUFFER_BYTES: Final = 256 * 1024


class LineWriter:
    """Appends whole lines to a file; buffered, thread-safe, flushed when told to or when 256 KiB have gathered.

    Opening for append repairs a torn tail: bytes after the last newline, left by a process that died in the middle
    of a write, are cut off (`repaired` says how many). A lock on the file keeps a second writer out.
    Raises ConfigurationError, naming the path, when the file cannot be opened or somebody else writes to it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = Lock()
        self._buffer = bytearray()
        self._closed = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(f"cannot write the log {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise ConfigurationError(f"the log {self.path} is being written by another process") from error
        self.repaired = self._repair_tail()

    def _repair_tail(self) -> int:
        size = os.lseek(self._fd, 0, os.SEEK_END)
        keep = size
        while keep > 0:
            start = max(0, keep - 65536)
            newline = os.pread(self._fd, keep - start, start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < size:
            os.ftruncate(self._fd, keep)
        os.lseek(self._fd, keep, os.SEEK_SET)
        return size - keep

    def write(self, line: bytes) -> None:
        """Add one line, without its newline."""
        with self._lock:
            self._buffer += line
            self._buffer += b"\n"
            if len(self._buffer) >= BUFFER_BYTES:
                self._drain()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        if self._closed:
            self._buffer.clear()
            return
        view = memoryview(bytes(self._buffer))
        written = 0
        try:
            while written < len(view):
                written += os.write(self._fd, view[written:])
        finally:
            del self._buffer[:written]

    def close(self) -> None:
        """Flush and close; closing twice does nothing."""
        with self._lock:
            if self._closed:
                return
            try:
                self._drain()
            finally:
                self._closed = True
                os.close(self._fd)
