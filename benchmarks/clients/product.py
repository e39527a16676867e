"""The product: `LifecycleEngine` over `SGLangBackend`, with its log and its snapshots on."""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio

from adapters.sglang import SGLangBackend
from benchmarks.clients.load import PROMPT, Load, Result
from lifecycle import LifecycleEngine, RolloutRequest, SqliteStore


async def run(load: Load) -> list[Result]:
    """All samples: submit, wait until they are at rest and stored, close everything."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, SqliteStore(Path(folder) / "run.db") as store:
        async with (
            SGLangBackend(
                list(load.urls),
                max_connections=load.streams,
                transport=load.options.get("transport", "auto"),
            ) as backend,
            LifecycleEngine(
                backend, store=store, log=Path(folder) / "lifecycle.jsonl", max_in_flight=load.streams
            ) as engine,
        ):

            async def generate(request: RolloutRequest) -> None:
                snapshot = await engine.generate(request)
                results.append((snapshot.tokens, snapshot.logprobs))

            async with anyio.create_task_group() as tasks:
                for _ in range(load.streams):
                    tasks.start_soon(generate, request(load))
    return results


def request(load: Load) -> RolloutRequest:
    """One sample as a caller asks for it."""
    return RolloutRequest(
        prompt_ids=PROMPT,
        max_new_tokens=load.tokens,
        sampling_params={"temperature": 1.0},
        extra={"together": load.streams if load.together else 0},
    )
