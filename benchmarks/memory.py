"""What is held in memory: per observed token, and per rollout that waits for its turn.

    python -m benchmarks.memory [--quick] [--json]

Measured with `tracemalloc`, in a live engine with log and store on; what stays when everything is written counts.
"""

from __future__ import annotations

import gc
import tempfile
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio

from benchmarks.rows import Row, command
from lifecycle import LifecycleEngine, RolloutRequest, SqliteStore
from lifecycle.call import Call
from lifecycle.events import StreamEvent, TokenSlice
from lifecycle.testing.backend import ABORTED, ScriptedBackend

PROMPT = tuple(range(16))


class Streaming(ScriptedBackend):
    """Brings `tokens` tokens, one at a time, and is then silent until it is aborted; `full` counts streams that got there."""

    def __init__(self, tokens: int) -> None:
        super().__init__(lambda _: [])
        self.tokens = tokens
        self.full = 0

    async def stream(self, call: Call) -> AsyncIterator[Sequence[StreamEvent]]:
        asked = self.live[call.rid] = anyio.Event()
        yield ()
        for number in range(self.tokens):
            yield [TokenSlice(array("i", [number]), array("d", [-0.5]), "7", None)]
        self.full += 1
        await asked.wait()
        yield [ABORTED]


def held() -> int:
    """Bytes that Python has allocated and not freed."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def tokens(folder: Path, streams: int, each: int) -> float:
    """Bytes per observed token: streams of `each` tokens against streams of one."""
    sizes = []
    for count in (1, each):
        backend = Streaming(count)
        with SqliteStore(folder / f"tokens-{count}.db") as store:
            async with LifecycleEngine(backend, store=store, log=folder / f"{count}.jsonl") as engine:
                before = held()
                for _ in range(streams):
                    engine.submit(RolloutRequest(prompt_ids=PROMPT, max_new_tokens=each + 1))
                while backend.full < streams:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                await engine.core.recorder.storage.durable()
                assert engine.stats().observed_tokens == streams * count
                sizes.append(held() - before)
    return (sizes[1] - sizes[0]) / streams / (each - 1)


async def idle(folder: Path, rollouts: int) -> float:
    """Bytes per rollout that waits for its turn, apart from its prompt."""
    backend = Streaming(1)
    with SqliteStore(folder / "idle.db") as store:
        async with LifecycleEngine(
            backend, store=store, log=folder / "idle.jsonl", max_in_flight=1
        ) as engine:
            engine.submit(RolloutRequest(prompt_ids=PROMPT))
            await anyio.sleep(0.05)
            await engine.core.recorder.storage.durable()
            before = held()
            for _ in range(rollouts):
                engine.submit(RolloutRequest(prompt_ids=PROMPT, sampling_params={"temperature": 1.0}))
            await engine.core.recorder.storage.durable()
            taken = held() - before
            assert engine.stats().states["pending"] == rollouts
    return taken / rollouts


def measure(quick: bool) -> list[Row]:
    """The rows about memory."""
    streams, each, rollouts = (8, 2_048, 500) if quick else (16, 8_192, 2_000)
    tracemalloc.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            per_token = anyio.run(tokens, Path(folder), streams, each)
            per_rollout = anyio.run(idle, Path(folder), rollouts)
    finally:
        tracemalloc.stop()
    return [
        Row("memory per observed token", per_token, 16, "bytes", f"{streams} streams of {each:,} tokens"),
        Row("memory per idle rollout, prompt apart", per_rollout / 1000, 3, "kB", f"{rollouts:,} rollouts"),
    ]


if __name__ == "__main__":
    command(__doc__, measure)
