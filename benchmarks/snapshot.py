"""What durable snapshots cost: save, restore, encode, and checkpoints under 256 streams.

    python -m benchmarks.snapshot [--json]

Durable means: `fsync` was called and returned. The folder for the database is the system's temporary one, or TMPDIR.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

from lifecycle.call import Call
from lifecycle.codec import decode_snapshot, encode_snapshot
from lifecycle.engine import LifecycleEngine
from lifecycle.engine.settings import EngineSettings
from lifecycle.events import StreamEvent, TokenSlice
from lifecycle.request import RolloutRequest
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import FinishReason, RolloutState
from lifecycle.stores import SqliteStore, StoreWriter
from lifecycle.testing.backend import ScriptedBackend, finish

ROLLOUTS, TOKENS, PROMPT, ROUNDS = 1000, 4096, 512, 3
STREAMS, PACE, SECONDS = 256, 30.0, 6.0
LIMITS = {"save": 1.0, "restore": 0.5, "codec_16k": 0.001, "checkpoint_cpu": 0.05}


def partials(count: int = ROLLOUTS, tokens: int = TOKENS) -> list[Snapshot]:
    """Rollouts of a long-context run, all different."""
    source = random.Random(1)
    logprobs = array("d", [-source.expovariate(1.0) for _ in range(tokens)])
    prompt = tuple(source.randrange(150_000) for _ in range(PROMPT))
    return [
        Snapshot(
            request=RolloutRequest(id=f"rollout-{number:05}", prompt_ids=prompt, max_new_tokens=32_768),
            state=RolloutState.ABORTED,
            tokens=array("i", range(number, number + tokens)),
            logprobs=logprobs,
            attempt=1,
        )
        for number in range(count)
    ]


def best(rounds: int, work: Callable[[], float]) -> float:
    """The shortest of some rounds: what the machine can do when nobody disturbs it."""
    return min(work() for _ in range(rounds))


def save(values: Sequence[Snapshot], folder: Path) -> tuple[float, float]:
    """Seconds from the first `put` to all durable through a writer thread, and what all of it blocked its caller."""
    store = SqliteStore(folder / "save.db")
    writer = StoreWriter(store, owner="benchmark")
    began = time.perf_counter()
    for value in values:
        writer.put(value)
    handed = time.perf_counter() - began
    writer.flush().result()
    taken = time.perf_counter() - began
    writer.close()
    store.close()
    return taken, handed


def restore(folder: Path) -> float:
    """Seconds to claim and decode everything in a file that was closed."""
    with SqliteStore(folder / "save.db") as store:
        began = time.perf_counter()
        claim = store.claim("restored", 30.0)
        taken = time.perf_counter() - began
        assert len(claim.claimed) == ROLLOUTS
        assert not claim.unreadable
        store.release("restored")
    return taken


def tails(values: Sequence[Snapshot], folder: Path) -> float:
    """Seconds to save 512 more tokens of every rollout durably."""
    with SqliteStore(folder / "save.db") as store:
        epoch = store.claim("checkpoints", 30.0).claimed[0].epoch
        began = time.perf_counter()
        for value in values:
            ids, logprobs = array("i", range(512)), value.logprobs[:512]
            store.append(Tail(id=value.id, attempt=1, start=TOKENS, tokens=ids, logprobs=logprobs), epoch)
        store.flush()
        return time.perf_counter() - began


def codec(tokens: int) -> float:
    """Seconds to encode and decode one rollout."""
    (value,) = partials(1, tokens)

    def once() -> float:
        began = time.perf_counter()
        decode_snapshot(encode_snapshot(value))
        return time.perf_counter() - began

    return best(50, once)


class PacedBackend(ScriptedBackend):
    """Every stream brings one token every `1 / PACE` seconds, until `SECONDS` are over."""

    async def stream(self, call: Call) -> AsyncIterator[Sequence[StreamEvent]]:  # noqa: ARG002
        """One attempt."""
        began = anyio.current_time()
        for number in range(int(PACE * SECONDS)):
            await anyio.sleep(max(0.0, began + number / PACE - anyio.current_time()))
            yield [TokenSlice([number], [-0.5], "1")]
        yield [finish(FinishReason.LENGTH)]


def streams(store: SqliteStore | None) -> tuple[float, float, int]:
    """CPU seconds, wall seconds and stored records of a run of all streams; every stream checkpoints each second."""

    async def run() -> dict[str, Any]:
        backend = PacedBackend(lambda _: [])
        async with LifecycleEngine(
            backend, store=store, max_in_flight=STREAMS, checkpoint_seconds=1.0, checkpoint_tokens=512
        ) as engine:
            handles = [
                engine.submit(RolloutRequest(prompt_ids=[1] * PROMPT, max_new_tokens=int(PACE * SECONDS)))
                for _ in range(STREAMS)
            ]
            for handle in handles:
                await handle.wait()
            return engine.stats().store

    cpu, wall = time.process_time(), time.perf_counter()
    stats = anyio.run(run)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    saved = stats.get("saved", 0)
    return cpu, wall, saved


def checkpoints(folder: Path, rounds: int = 2) -> dict[str, float]:
    """What checkpoints add to the CPU time of 256 streams, as a share of one core, at one and at ten seconds each."""
    shares, plain, records = [], [], 0
    for number in range(rounds):
        without, wall, _ = streams(None)
        with SqliteStore(folder / f"streams-{number}.db") as store:
            with_store, _, records = streams(store)
        shares.append((with_store - without) / wall)
        plain.append(without / wall)
    share = statistics.median(shares)
    return {
        "streams_cpu_without": statistics.median(plain),
        "checkpoint_cpu_each_second": share,
        "checkpoint_cpu": share * 1.0 / EngineSettings().checkpoint_seconds,
        "records": records,
    }


def measure(folder: Path, *, with_streams: bool) -> dict[str, float]:
    """All numbers."""
    values = partials()
    saved, handed, restored = [], [], []
    for number in range(ROUNDS):
        place = folder / str(number)
        place.mkdir()
        taken, blocked = save(values, place)
        saved.append(taken)
        handed.append(blocked)
        restored.append(restore(place))
    results = {
        "save": min(saved),
        "save_blocks_caller": min(handed),
        "restore": min(restored),
        "tails_512": tails(values, folder / "0"),
        "megabytes": (folder / "0" / "save.db").stat().st_size / 1e6,
        "codec_4k": codec(4096),
        "codec_16k": codec(16_384),
    }
    if with_streams:
        results |= checkpoints(folder)
    return results


def table(results: dict[str, float]) -> str:
    """For people."""
    names = {
        "save": f"save {ROLLOUTS} x {TOKENS} tokens durably, s",
        "save_blocks_caller": "… of which the caller waits, s",
        "restore": f"restore {ROLLOUTS} x {TOKENS} tokens, s",
        "tails_512": f"checkpoint {ROLLOUTS} x 512 more tokens durably, s",
        "megabytes": "size of the store, MB",
        "codec_4k": "encode and decode 4,096 tokens, s",
        "codec_16k": "encode and decode 16,384 tokens, s",
        "streams_cpu_without": f"{STREAMS} streams at {PACE:.0f} tokens/s without a store, cores",
        "checkpoint_cpu_each_second": "… checkpoints each second add, cores",
        "checkpoint_cpu": "… checkpoints every 10 s (the default) add, cores",
        "records": "… records saved",
    }
    lines = [f"{'':60} {'measured':>10} {'limit':>8}"]
    for key, value in results.items():
        limit = f"{LIMITS[key]:>8g}" if key in LIMITS else ""
        lines.append(f"{names[key]:60} {value:>10.4g} {limit}".rstrip())
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="What durable snapshots cost.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-streams", action="store_true", help="leave out the runs of 256 streams (25 s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), with_streams=not given.no_streams)
    if given.json:
        machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}
        print(json.dumps({"machine": machine, "limits": LIMITS, "results": results}, indent=2))
    else:
        print(table(results))


if __name__ == "__main__":
    main()
