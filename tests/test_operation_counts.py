"""What the whole path from socket to log costs, in operations: counts do not flake, and a lost shortcut shows."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.sglang import SGLangBackend, transport_fast, wire
from adapters.sglang.simulator import SimulatedCluster
from lifecycle import LifecycleEngine, MemoryStore, RolloutRequest, RolloutState
from lifecycle.engine.core import Core
from lifecycle.engine.handle import RolloutHandle
from lifecycle.states import Outcome

PROMPT = [39, 68, 75, 75, 78]
STREAMS = 4
SHORT, LONG = 20, 200
LINES = ("dispatch", "observe", "finish", "rollout.rest", "rollout.disposition")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    """Two workers, in a thread of their own: their loop and its timers are not the client's."""
    with SimulatedCluster(workers=2, mode="incremental", seed=3, tokens_per_second=2_000) as cluster:
        yield cluster


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the steps of the path were taken."""
    counts: Counter[str] = Counter()

    def count(where: Any, name: str, step: str) -> None:
        original = getattr(where, name)

        def counted(*args: Any, **named: Any) -> Any:
            counts[step] += 1
            return original(*args, **named)

        monkeypatch.setattr(where, name, counted)

    count(Core, "absorb", "batches")
    count(transport_fast.Connection, "buffer_updated", "reads")
    count(transport_fast.Connection, "_wait", "waits")
    return counts


class CountingDecoder:
    """A JSON decoder that counts."""

    def __init__(self, decoder: Any, counts: Counter[str]) -> None:
        self._decoder = decoder
        self._counts = counts

    def decode(self, payload: bytes) -> Any:
        """Decode and count."""
        self._counts["decodes"] += 1
        return self._decoder.decode(payload)


def request(tokens: int) -> RolloutRequest:
    """One sample of exactly `tokens` tokens."""
    return RolloutRequest(
        prompt_ids=PROMPT,
        max_new_tokens=tokens,
        sampling_params={"temperature": 0, "ignore_eos": True},
    )


async def generate(urls: list[str], tokens: int, log: Path | None = None) -> None:
    """Some samples over the fast transport."""
    async with (
        SGLangBackend(urls, transport="fast") as backend,
        LifecycleEngine(backend, log=log, store=MemoryStore()) as engine,
    ):
        snapshots = await asyncio.gather(*(engine.generate(request(tokens)) for _ in range(STREAMS)))
        assert [len(snapshot.tokens) for snapshot in snapshots] == [tokens] * STREAMS


def test_one_decode_a_token_and_one_batch_a_read(
    cluster: SimulatedCluster, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk is decoded once, each read is applied once, and a reader waits at most once a read."""
    monkeypatch.setattr(wire, "CHUNK", CountingDecoder(wire.CHUNK, counts))
    asyncio.run(generate(cluster.urls, LONG))
    assert counts["decodes"] == STREAMS * LONG
    assert counts["batches"] <= counts["reads"]
    assert counts["waits"] <= counts["reads"] + 2 * STREAMS


def test_log_lines_do_not_grow_with_length(cluster: SimulatedCluster, tmp_path: Path) -> None:
    """A rollout is five lines, whatever its length: dispatch, first tokens, end, rest and what became of it."""
    for tokens in (SHORT, LONG):
        log = tmp_path / f"{tokens}.jsonl"
        asyncio.run(generate(cluster.urls, tokens, log))
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        found = Counter(line.get("trigger") or line["event"] for line in lines if "rollout_id" in line)
        assert found == dict.fromkeys(LINES, STREAMS)


def test_timers_and_tasks_do_not_grow_with_length(cluster: SimulatedCluster) -> None:
    """No timer and no task is made per chunk: ten times the tokens need no more of either."""
    found = []
    for tokens in (SHORT, LONG):
        counts: Counter[str] = Counter()

        async def counting(tokens: int = tokens, counts: Counter[str] = counts) -> None:
            loop = asyncio.get_running_loop()
            call_at = loop.call_at

            def counted(*args: Any, **named: Any) -> asyncio.TimerHandle:
                counts["timers"] += 1
                return call_at(*args, **named)

            def task(loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
                counts["tasks"] += 1
                return asyncio.Task(coroutine, loop=loop, **named)

            loop.call_at = counted  # type: ignore[method-assign]
            loop.set_task_factory(task)
            await generate(cluster.urls, tokens)

        asyncio.run(counting())
        found.append(counts)
    short, long = found
    assert long["tasks"] <= short["tasks"] + STREAMS
    assert long["timers"] <= short["timers"] + 2 * STREAMS + LONG // 20


def test_one_request_an_abort(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the workers are known, an abort of n rollouts is n requests, each to the worker that has it."""
    asked: Counter[str] = Counter()
    opened = transport_fast.FastTransport.open

    async def counted(self: Any, method: str, url: str, *rest: Any) -> Any:
        asked[url.rpartition("/")[2]] += 1
        return await opened(self, method, url, *rest)

    monkeypatch.setattr(transport_fast.FastTransport, "open", counted)

    async def run() -> None:
        async with (
            SGLangBackend(cluster.urls, transport="fast") as backend,
            LifecycleEngine(backend, store=MemoryStore()) as engine,
        ):
            handles = [engine.submit(request(4_000)) for _ in range(12)]
            await asyncio.gather(*map(first_tokens, handles))
            report = await engine.abort(handles, timeout=20)
            assert set(report.outcomes.values()) == {Outcome.CONFIRMED}

    asyncio.run(run())
    assert asked["generate"] == 12
    assert asked["abort_request"] == 12


async def first_tokens(handle: RolloutHandle) -> None:
    """Wait until a rollout has shown tokens."""
    async for snapshot in handle.updates():
        if snapshot.state is RolloutState.PARTIAL:
            return


def test_first_token_is_seen_within_one_turn(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting reader has the first token one turn of the event loop after it was applied, and no later."""
    turns = 0
    applied: list[int] = []
    absorb = Core.absorb

    def noted(self: Core, flight: Any, batch: Any) -> bool:
        over = absorb(self, flight, batch)
        if flight.rollout.tokens and not applied:
            applied.append(turns)
        return over

    monkeypatch.setattr(Core, "absorb", noted)

    async def run() -> int:
        nonlocal turns

        def turn() -> None:
            nonlocal turns
            turns += 1
            ticking[0] = loop.call_soon(turn)

        loop = asyncio.get_running_loop()
        ticking = [loop.call_soon(turn)]
        async with (
            SGLangBackend(cluster.urls, transport="fast") as backend,
            LifecycleEngine(backend) as engine,
        ):
            await first_tokens(engine.submit(request(SHORT)))
            seen = turns
        ticking[0].cancel()
        return seen

    seen = asyncio.run(run())
    assert seen - applied[0] <= 1
