"""How long `lifecycle report` takes on a big log, and how much memory: default, and `--strict` with everything.

Everything is JSON, the page and the time lines.

    python -m benchmarks.report --lines 5000000 [--log FILE] [--json]

Each run is a process of its own; wall clock, CPU time and peak memory are those of that process. With `--log` an
existing log is used, otherwise one is generated first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.generate_log import write_log

LIMITS = {"default": (6.0, 500), "strict": (25.0, 1200)}  # seconds, MB


def measure(arguments: list[str]) -> dict[str, float]:
    """Run the command line once and look at the process afterwards."""
    begun = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "lifecycle", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"lifecycle {' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}")
    return {
        "seconds": round(time.perf_counter() - begun, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mb": round(usage.ru_maxrss / 1024),
    }


def best(arguments: list[str], repeats: int) -> dict[str, float]:
    """The run with the least wall clock: other programs only ever add to it."""
    return min((measure(arguments) for _ in range(repeats)), key=lambda run: run["seconds"])


def run(log: Path, repeats: int) -> dict[str, Any]:
    """Both forms of the report over one log."""
    with tempfile.TemporaryDirectory() as directory:
        page, trace = str(Path(directory) / "report.html"), str(Path(directory) / "trace.json")
        results = {
            "default": best(["report", str(log)], repeats),
            "strict": best(
                ["report", str(log), "--strict", "--json", "--html", page, "--trace", trace], repeats
            ),
        }
    return {"bytes": log.stat().st_size, "cores": os.cpu_count(), **results}


def main() -> None:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=5_000_000)
    parser.add_argument("--log", type=Path, help="use this log")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        log = given.log
        if log is None:
            log = write_log(Path(directory) / "log.jsonl", given.lines, crash_every=100, restart_every=70)[0]
        results = run(log, given.repeats)
    if given.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{results['bytes'] / 1e6:,.0f} MB of log, {results['cores']} cores")
    for name, (seconds, megabytes) in LIMITS.items():
        found = results[name]
        print(
            f"{name:8} {found['seconds']:6.2f} s (to reach: {seconds:g})   {found['cpu_s']:6.2f} s CPU   "
            f"{found['peak_mb']:5.0f} MB (to reach: {megabytes:g})"
        )


if __name__ == "__main__":
    main()
