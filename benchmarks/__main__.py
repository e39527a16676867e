"""Every row of the table to reach, in one go.

    python -m benchmarks [--quick] [--json] [--only stream,abort,…] [--write FILE]

Exit status 1 if a row is not reached (stretch rows apart): for people who look, never for the test suite.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks import abort, memory, stream, transition
from benchmarks.report import LIMITS
from benchmarks.rows import Row, as_json, markdown, say, table
from benchmarks.snapshot import codec


def snapshot(_quick: bool) -> list[Row]:
    """The row about snapshots; `python -m benchmarks.snapshot` has more of them."""
    return [Row("Snapshot encode + decode of 16k tokens", codec(16_384) * 1e3, 1, "ms", "best of 50")]


def report(quick: bool) -> list[Row]:
    """The rows about `lifecycle report`, from its own script."""
    lines = 500_000 if quick else 5_000_000
    argv = [sys.executable, "-m", "benchmarks.report", "--lines", str(lines), "--repeats", "3", "--json"]
    found = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout)
    rows = []
    for name, words in (("default", "default"), ("strict", "everything with --strict")):
        limits = (None, None) if quick else LIMITS[name]
        for value, limit, unit in zip(
            (found[name]["seconds"], found[name]["peak_mb"]), limits, ("s", "MB"), strict=True
        ):
            rows.append(
                Row(
                    f"lifecycle report over {lines:,} lines: {words}",
                    value,
                    limit,
                    unit,
                    f"best of 3; {found[name]['cpu_s']:.1f} s CPU",
                )
            )
    return rows


MARK = "<!-- the table: python -m benchmarks --write benchmarks/RESULTS.md -->\n"


def write(page: Path, rows: list[Row]) -> None:
    """Replace everything behind the mark by the table."""
    before, mark, _ = page.read_text().partition(MARK) if page.exists() else ("", MARK, "")
    page.write_text(before + (mark or MARK) + "\n" + markdown(rows))


PARTS = {
    "stream": stream.measure,
    "transition": transition.measure,
    "memory": memory.measure,
    "snapshot": snapshot,
    "abort": abort.measure,
    "report": report,
}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="fewer tokens, lines and rounds")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="put the table into this Markdown page, too"
    )
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--only: no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    rows: list[Row] = []
    for name in names:
        say(f"{name} …")
        rows += PARTS[name](given.quick)
    if given.write is not None:
        write(given.write, rows)
    print(as_json(rows) if given.json else table(rows))
    return int(any(row.reached is False and not row.stretch for row in rows))


if __name__ == "__main__":
    sys.exit(main())
