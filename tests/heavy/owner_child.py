"""A process with an engine over a shared store; driven and watched by the tests beside it.

    python -m tests.heavy.owner_child own STORE URL LOG TTL    submit ROLLOUTS and wait for all of them
    python -m tests.heavy.owner_child heir STORE URL LOG TTL   restore until every rollout is accounted for, and wait

It prints one JSON list a line: `["ready"]`, `["restored", ID…]`, `["delivered", ID, TOKENS, LOGPROBS]` only after the
engine has said so, `["fenced", ID]`, and `["done", PLACES, LEDGER]` at the end. An heir looks into the store again and
again until nobody waits for anything in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import partial

import anyio
import anyio.abc
import anyio.to_thread

from adapters.sglang import SGLangBackend
from lifecycle import LifecycleEngine, RolloutHandle, RolloutRequest, SqliteStore
from lifecycle.errors import Fenced

SHORT, LONG = 20, 400
ROLLOUTS = [
    RolloutRequest(
        id=f"r{number:02}",
        prompt_ids=[number, 7],
        max_new_tokens=SHORT if number % 4 == 0 else LONG,
        sampling_params={"ignore_eos": True},
    )
    for number in range(16)
]
CHECKPOINT_TOKENS = 8


def say(*words: object) -> None:
    """Tell the test."""
    print(json.dumps(words), flush=True)  # noqa: T201  the protocol with the parent


async def deliver(handle: RolloutHandle) -> None:
    """Wait like any caller."""
    try:
        snapshot = await handle.wait()
    except Fenced:
        say("fenced", handle.id)
    else:
        say("delivered", snapshot.id, list(snapshot.tokens), list(snapshot.logprobs))


def start(tasks: anyio.abc.TaskGroup, handles: Iterable[RolloutHandle]) -> None:
    """One caller for each."""
    for handle in handles:
        tasks.start_soon(deliver, handle)


async def own(engine: LifecycleEngine, store: SqliteStore) -> None:
    """Submit, and wait for everything."""
    async with anyio.create_task_group() as tasks:
        handles = [engine.submit(request) for request in ROLLOUTS]
        start(tasks, handles)
        while any(row.tokens < CHECKPOINT_TOKENS for row in await anyio.to_thread.run_sync(store.rows)):  # noqa: ASYNC110
            await anyio.sleep(0.01)
        say("ready")


async def inherit(engine: LifecycleEngine, store: SqliteStore) -> None:
    """Restore what can be had, as often as there is something that nobody has finished."""
    say("ready")
    async with anyio.create_task_group() as tasks:
        while await anyio.to_thread.run_sync(store.pending):
            report = await engine.restore()
            assert not report.unreadable
            if report.handles:
                say("restored", *sorted(handle.id for handle in report.handles))
                start(tasks, report.handles)
            await anyio.sleep(0.05)


async def main(mode: str, where: str, url: str, log: str, ttl: float) -> None:
    """Run one engine until it is through."""
    store = SqliteStore(where)
    async with (
        SGLangBackend(url) as backend,
        LifecycleEngine(
            backend, store=store, log=log, lease_seconds=ttl, checkpoint_tokens=CHECKPOINT_TOKENS
        ) as engine,
    ):
        await (own if mode == "own" else inherit)(engine, store)
        say("done", engine.places(), engine.ledger().as_dict())
    store.close()


if __name__ == "__main__":
    chosen, store_name, server, log_file, seconds = sys.argv[1:]
    anyio.run(partial(main, chosen, store_name, server, log_file, float(seconds)))
