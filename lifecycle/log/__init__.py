"""The lifecycle log: one JSON object a line, an explicit schema, every key of an event always present.

`records` is the schema, `writer` the file, `journal` what the engine writes to, `reader` what reads it back.
"""

from __future__ import annotations

from lifecycle.log.journal import Journal, shorten
from lifecycle.log.reader import Damaged, LogLine, read_log
from lifecycle.log.records import RECORD_TYPES, SCHEMA_VERSION, Record
from lifecycle.log.writer import LineWriter

__all__ = [
    "RECORD_TYPES",
    "SCHEMA_VERSION",
    "Damaged",
    "Journal",
    "LineWriter",
    "LogLine",
    "Record",
    "read_log",
    "shorten",
]
