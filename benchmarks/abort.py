"""How fast aborts are, and what they take.

    python -m benchmarks.abort [--quick] [--json]

512 rollouts stream from four workers, at 40 tokens a second each, and are aborted at once: seconds from
`engine.abort` to all at rest, and the requests sent for it. Then single rollouts are aborted, one after the other,
while 1,000 others go on streaming, at 10 tokens a second each: what one core carries with ease.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx

from adapters.sglang import SGLangBackend
from benchmarks.rows import Row, command, say
from benchmarks.runs import server
from benchmarks.server import raise_file_limit
from lifecycle import LifecycleEngine, RolloutRequest, RolloutState, SqliteStore
from lifecycle.engine.handle import RolloutHandle
from lifecycle.states import Outcome

MANY, WORKERS, RATE, TOKENS = 512, 4, 40, 4_000
OTHERS, SLOW = 1_000, 10
ROUNDS = 3


def request() -> RolloutRequest:
    """One long sample."""
    return RolloutRequest(prompt_ids=range(16), max_new_tokens=TOKENS)


async def streaming(engine: LifecycleEngine, count: int) -> list[RolloutHandle]:
    """`count` rollouts that have all shown tokens."""
    handles = [engine.submit(request()) for _ in range(count)]
    while any(handle.state is not RolloutState.PARTIAL for handle in handles):  # noqa: ASYNC110
        await anyio.sleep(0.02)
    return handles


def requests_seen(url: str) -> int:
    """How many abort requests the workers have had."""
    return int(httpx.get(f"{url}/aborts").text)


async def all_at_once(engine: LifecycleEngine, url: str) -> dict[str, float]:
    """Abort 512 together."""
    handles = await streaming(engine, MANY)
    seen = await anyio.to_thread.run_sync(requests_seen, url)
    began = time.perf_counter()
    report = await engine.abort(handles, timeout=60.0)
    taken = time.perf_counter() - began
    assert all(handle.state is RolloutState.ABORTED for handle in handles)
    assert set(report.outcomes.values()) == {Outcome.CONFIRMED}, Counter(report.outcomes.values())
    return {"seconds": taken, "requests": await anyio.to_thread.run_sync(requests_seen, url) - seen}


async def one_by_one(engine: LifecycleEngine, count: int) -> list[float]:
    """Milliseconds of single aborts while the others stream."""
    others = await streaming(engine, OTHERS)
    taken = []
    for _ in range(count):
        (handle,) = await streaming(engine, 1)
        began = time.perf_counter()
        report = await engine.abort([handle], timeout=60.0)
        taken.append((time.perf_counter() - began) * 1e3)
        assert report.outcomes == {handle.id: Outcome.CONFIRMED}
    states = Counter(str(other.state) for other in others)
    assert states == {RolloutState.PARTIAL: OTHERS}, (states, [o.rollout.detail for o in others][:3])
    await engine.abort(others, timeout=60.0)
    return taken


async def client(urls: list[str], singles: int) -> dict[str, Any]:
    """One of the two measurements."""
    with tempfile.TemporaryDirectory() as folder, SqliteStore(Path(folder) / "run.db") as store:
        async with (
            SGLangBackend(urls, max_connections=OTHERS + 64) as backend,
            LifecycleEngine(
                backend, store=store, log=Path(folder) / "log.jsonl", max_in_flight=OTHERS + 64
            ) as engine,
        ):
            if singles:
                return {"singles": await one_by_one(engine, singles)}
            return {"many": [await all_at_once(engine, urls[0]) for _ in range(ROUNDS)]}


def measure(quick: bool) -> list[Row]:
    """The rows about aborts."""
    found = {}
    for rate, singles in ((RATE, 0), (SLOW, 30 if quick else 200)):
        with server("--workers", WORKERS, "--tokens", TOKENS, "--rate", rate) as urls:
            argv = [sys.executable, "-m", "benchmarks.abort", "--client", str(singles), *urls]
            done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
        found |= json.loads(done.stdout)
    seconds = [run["seconds"] for run in found["many"]]
    requests = max(run["requests"] for run in found["many"])
    singles = sorted(found["singles"])
    p99 = singles[min(len(singles) - 1, round(0.99 * len(singles)))]
    say(f"  aborts: {seconds}, {requests} requests, singles up to {singles[-1]:.1f} ms")
    note = f"{requests} requests for {MANY} rollouts; all confirmed by the workers"
    return [
        Row(
            f"abort of {MANY} over {WORKERS} workers, all at rest",
            statistics.median(seconds),
            None,
            "s",
            note,
        ),
        Row(f"abort requests per rollout, {WORKERS} workers known", requests / MANY, 1, "", note),
        Row(
            f"p99 of a single abort while {OTHERS:,} others stream",
            p99,
            None,
            "ms",
            f"median {statistics.median(singles):.1f} ms of {len(singles)}",
        ),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        raise_file_limit()
        print(json.dumps(anyio.run(client, sys.argv[3:], int(sys.argv[2]))))
    else:
        command(__doc__, measure)
