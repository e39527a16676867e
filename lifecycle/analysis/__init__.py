"""Reading the lifecycle from logs alone: reports, conformance, time lines. Needs no engine.

    sources      which files: globs, several processes and runs, JSON lines and Parquet
    lines        the n-th line of a file, without a database
    warehouse    every line as a compact row in DuckDB (extra `analysis`), damaged ones set aside
    report       what happened, as plain data
    conformance  what the machine forbids and happened all the same
    render, page the report for a terminal, and as one HTML file
    trace, story time lines for Perfetto, and one rollout in words

DuckDB is imported when a log is opened, never before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lifecycle.analysis.conformance import VIOLATION_KINDS, Violation, find_violations
    from lifecycle.analysis.page import write_page
    from lifecycle.analysis.parquet import to_parquet
    from lifecycle.analysis.report import Report, build_report
    from lifecycle.analysis.sources import Source, find_sources
    from lifecycle.analysis.story import tell_story
    from lifecycle.analysis.trace import write_trace
    from lifecycle.analysis.warehouse import Warehouse

_HOMES = {
    "VIOLATION_KINDS": "conformance",
    "Violation": "conformance",
    "find_violations": "conformance",
    "write_page": "page",
    "to_parquet": "parquet",
    "Report": "report",
    "build_report": "report",
    "Source": "sources",
    "find_sources": "sources",
    "tell_story": "story",
    "write_trace": "trace",
    "Warehouse": "warehouse",
}

__all__ = [
    "VIOLATION_KINDS",
    "Report",
    "Source",
    "Violation",
    "Warehouse",
    "build_report",
    "find_sources",
    "find_violations",
    "tell_story",
    "to_parquet",
    "write_page",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
