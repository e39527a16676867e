"""A row of the table to reach, and how rows are printed. Used by every script."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("httptools", "httpx", "anyio", "msgspec", "structlog", "duckdb")


@dataclass(frozen=True, slots=True)
class Row:
    """One claim: `value` is to be at most `limit`. `note` holds the figures behind a ratio; without a limit it informs."""

    what: str
    value: float
    limit: float | None = None
    unit: str = "x"
    note: str = ""
    stretch: bool = False

    @property
    def reached(self) -> bool | None:
        """Whether the limit holds; None where there is none."""
        return None if self.limit is None else self.value <= self.limit


def shown(row: Row) -> tuple[str, str, str, str, str]:
    """The cells of a row."""
    said = {None: "", True: "reached", False: "NOT REACHED"}[row.reached]
    limit = "" if row.limit is None else f"{row.limit:g} {row.unit}"
    if row.stretch and row.limit is not None:
        said = "stretch: " + ("reached" if row.reached else "not reached")
    return (row.what, f"{row.value:.3g} {row.unit}", limit, said, row.note)


def table(rows: Iterable[Row]) -> str:
    """For people."""
    cells = [("what", "measured", "at most", "", "medians behind it"), *map(shown, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), line[1].rjust(widths[1]), line[2].rjust(widths[2])])
        + f"  {line[3].ljust(widths[3])}  {line[4]}"
        for line in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows: Iterable[Row]) -> str:
    """For a page: when and where, and the table."""
    head = ("what", "measured", "at most", "", "medians behind it")
    lines = [head, ("---", "--:", "--:", "---", "---"), *map(shown, rows)]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    found = ", ".join(f"{name} {value}" for name, value in machine().items())
    today = datetime.now(tz=UTC).date().isoformat()
    load = os.getloadavg()[0]
    return f"Measured on {today}: {found}. Load average at the end: {load:.1f}.\n\n{body}\n"


def machine() -> dict[str, str]:
    """Where the figures come from."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}, {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    } | {name: found for name in PACKAGES if (found := _version(name))}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def say(text: str) -> None:
    """Progress, apart from the results."""
    print(text, file=sys.stderr, flush=True)


def as_json(rows: Sequence[Row]) -> str:
    """For programs."""
    found = [asdict(row) | {"reached": row.reached} for row in rows]
    return json.dumps({"machine": machine(), "rows": found}, indent=2, ensure_ascii=False)


def command(description: str | None, measure: Callable[[bool], list[Row]]) -> None:
    """The command of one script: `--quick` for a smaller run, `--json` for programs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--quick", action="store_true", help="fewer tokens and rounds; good enough to compare"
    )
    given = parser.parse_args()
    rows = measure(given.quick)
    print(as_json(rows) if given.json else table(rows))
