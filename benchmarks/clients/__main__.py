"""Run one client once and print what it took: CPU seconds of this process alone, wall seconds, peak memory."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.clients.load import Load, digest
from benchmarks.server import raise_file_limit


def peak_bytes() -> int:
    """The most memory this process has had since it was started (not its parent's, as `ru_maxrss` can be)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", choices=("baseline", "floor", "product"))
    parser.add_argument("--url", action="append", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    raise_file_limit()
    options = dict(option.split("=", 1) for option in given.option)
    client = importlib.import_module(f"benchmarks.clients.{given.client}")
    load = Load(tuple(given.url), given.streams, given.tokens, options=options)
    asyncio.run(client.run(replace(load, streams=2)))  # imports and caches are not what is measured
    cpu, wall = time.process_time(), time.perf_counter()
    results = asyncio.run(client.run(load))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    found = {"cpu_s": cpu, "wall_s": wall, "peak_bytes": peak_bytes(), "digest": digest(results)}
    print(json.dumps(found | {"streams": len(results)}))


if __name__ == "__main__":
    main()
