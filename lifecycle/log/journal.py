"""What the engine writes to: typed records in, structlog events out.

The library never calls `structlog.configure()`: our own chain is a logger of its own, and a caller may hand in any
structlog logger instead, which then gets the event name and the record's fields as keywords.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast
from uuid import uuid4

import msgspec

from lifecycle.log.records import Record, event_name
from lifecycle.log.writer import LineWriter

LONGEST_DETAIL = 300

_ENCODER = msgspec.json.Encoder()


class StructLogger(Protocol):
    """The part of a structlog logger that is used."""

    def info(self, event: str, **fields: Any) -> Any:
        """Log one event."""
        ...


class _LineLogger:
    """The end of our own chain: a bytes logger over a `LineWriter` that does not flush every line."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def msg(self, line: bytes) -> None:
        self._writer.write(line)

    info = msg


def _encode_record(_logger: object, _method: str, event_dict: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(event_dict["record"])


def line_logger(writer: LineWriter) -> StructLogger:
    """A structlog logger that writes records as JSON lines, with a chain of its own."""
    import structlog  # noqa: PLC0415  80 ms, and whoever reads logs needs none of it

    logger = structlog.wrap_logger(
        _LineLogger(writer),
        processors=[_encode_record],
        wrapper_class=structlog.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return cast("StructLogger", logger.bind())


def new_process_id() -> str:
    """Host, process number and a random part: unique even after numbers are used again."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class Identity:
    """Which run and process the lines belong to."""

    run_id: str
    process_id: str


class Journal:
    """Writes records to a file, to a caller's structlog logger, or nowhere.

    `log` is a path, a structlog logger or None. `emit` returns when the line is in the buffer; `flush` when the
    operating system has it.
    """

    def __init__(
        self,
        log: str | os.PathLike[str] | StructLogger | None,
        *,
        run_id: str | None = None,
        process_id: str | None = None,
    ) -> None:
        self.identity = Identity(run_id or uuid4().hex[:12], process_id or new_process_id())
        self.step: int | None = None
        self.emitted = 0
        self.writer: LineWriter | None = None
        self._own: StructLogger | None = None
        self._foreign: StructLogger | None = None
        if isinstance(log, str | os.PathLike):
            self.writer = LineWriter(log)
            self._own = line_logger(self.writer)
        elif log is not None:
            self._foreign = log

    @property
    def enabled(self) -> bool:
        """Whether anybody reads what is emitted."""
        return self._own is not None or self._foreign is not None

    def emit(self, record: Record) -> None:
        """Write one record."""
        self.emitted += 1
        if self._own is not None:
            self._own.info("", record=record)
        elif self._foreign is not None:
            self._foreign.info(event_name(record), **msgspec.structs.asdict(record))

    def flush(self) -> None:
        """Hand buffered lines to the operating system; called from the loop and from the store's writer thread."""
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Flush and close the file; what is emitted later is nobody's."""
        self._own = self._foreign = None
        if self.writer is not None:
            self.writer.close()


def shorten(text: str | None) -> str | None:
    """The server's own words, cut to what a line can carry."""
    if text is None or len(text) <= LONGEST_DETAIL:
        return text
    return text[: LONGEST_DETAIL - 1] + "…"
