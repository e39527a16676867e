"""A real sglang-router in front of two simulated workers: what it hides, and what happens when a worker fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import anyio
import pytest

from adapters.sglang import SGLangBackend
from adapters.sglang.simulator import Fault, FaultKind, SimulatedCluster
from adapters.sglang.topology import Kind
from lifecycle.backend import Call, CallRef, ReceiptStatus, UpdateMode
from lifecycle.events import EndKind, StreamEvent
from lifecycle.states import Reason
from tests.support.router import RouterProcess, router_command
from tests.support.sglang_chunks import Seen

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(router_command() is None, reason="needs the wheel sglang-router (extra dev)"),
]
ACCEPTED, REFUSED, UNREACHABLE = ReceiptStatus.ACCEPTED, ReceiptStatus.REFUSED, ReceiptStatus.UNREACHABLE
PROMPT = [39, 68, 75, 75, 78]
Make = Callable[..., SGLangBackend]


@pytest.fixture(scope="module", params=["incremental", "cumulative"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SimulatedCluster]:
    """Two workers with one model."""
    with SimulatedCluster(workers=2, mode=request.param, seed=7, tokens_per_second=200) as cluster:
        yield cluster


@pytest.fixture
def runtime(cluster: SimulatedCluster) -> str:
    """Each mode with another loop and transport: the router's part is the same on all."""
    return {"incremental": "trio-httpx", "cumulative": "asyncio-fast"}[cluster[0].brain.settings.mode]


@pytest.fixture(scope="module")
def router(cluster: SimulatedCluster) -> Iterator[str]:
    """The router's URL."""
    with RouterProcess(cluster.urls) as router:
        yield router.url


class Streams:
    """Streams that are read side by side."""

    def __init__(
        self, backend: SGLangBackend, count: int, budget: int, prompts: list[list[int]] | None = None
    ) -> None:
        self.backend = backend
        self.prompts = prompts or [PROMPT] * count
        self.rids = [uuid4().hex for _ in self.prompts]
        self.events: dict[str, list[StreamEvent]] = {rid: [] for rid in self.rids}
        self.started = {rid: anyio.Event() for rid in self.rids}
        self.budget = budget

    def refs(self) -> list[CallRef]:
        """Their names."""
        return [CallRef(rid, rid, 1) for rid in self.rids]

    async def read(self, rid: str, prompt: list[int]) -> None:
        """Read one to its end."""
        params = {"max_new_tokens": self.budget, "temperature": 0}
        async with aclosing(self.backend.stream(Call(rid, rid, 1, prompt, params))) as batches:
            async for batch in batches:
                self.events[rid].extend(batch)
                if Seen(self.events[rid]).tokens:
                    self.started[rid].set()

    async def run(self, meanwhile: Callable[[], Any] | None = None) -> dict[str, Seen]:
        """Read all; once each has shown something, do `meanwhile`."""
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for rid, prompt in zip(self.rids, self.prompts, strict=True):
                    tasks.start_soon(self.read, rid, prompt)
                for started in self.started.values():
                    await started.wait()
                if meanwhile is not None:
                    await meanwhile()
        return {rid: Seen(events) for rid, events in self.events.items()}


def check(cluster: SimulatedCluster, seen: Seen, prompt: list[int] = PROMPT) -> None:
    """Every token is the one that the model gives."""
    difference = cluster[0].call(
        lambda brain: brain.model.first_difference(prompt, seen.tokens, logprobs=seen.logprobs)
    )
    assert difference is None


async def holding(cluster: SimulatedCluster, index: int, rids: list[str]) -> set[str]:
    """Which of `rids` a worker holds."""
    return await anyio.to_thread.run_sync(cluster[index].call, lambda brain: set(rids) & set(brain.live))


async def idle(cluster: SimulatedCluster) -> None:
    """Wait until no worker holds anything."""
    for server in cluster.servers:
        await anyio.to_thread.run_sync(server.wait_until, lambda brain: brain.idle)


async def test_topology(backend_of: Make, router: str, cluster: SimulatedCluster) -> None:
    """The router is known as one, with its workers."""
    async with backend_of(router) as backend:
        found = await backend.topology()
        assert found.kind is Kind.ROUTER
        assert sorted(found.workers) == sorted(cluster.urls)


async def test_streams(backend_of: Make, router: str, cluster: SimulatedCluster) -> None:
    """Streams come through whole, from both workers, and the router hides from which."""
    async with backend_of(router) as backend:
        streams = Streams(backend, 6, budget=80)
        held: list[set[str]] = []

        async def look() -> None:
            await backend.topology()
            held.extend([await holding(cluster, index, streams.rids) for index in (0, 1)])
            assert all(backend.worker_of(rid) is None for rid in streams.rids)

        ends = await streams.run(look)
    assert all(held)
    for seen in ends.values():
        assert (seen.end.kind, seen.end.reason, len(seen.tokens)) == (EndKind.FINISHED, Reason.LENGTH, 80)
        check(cluster, seen)


async def test_abort(backend_of: Make, router: str, cluster: SimulatedCluster) -> None:
    """An abort reaches the workers behind the router, which has no such path, and ends each stream in its own words."""
    async with backend_of(router) as backend:
        streams = Streams(backend, 4, budget=20_000)

        async def abort() -> None:
            receipts = await backend.abort(streams.refs(), deadline=10)
            assert {(each.worker, each.status) for each in receipts} == {
                (url, ACCEPTED) for url in cluster.urls
            }
            assert sum(each.requests for each in receipts) == 8

        for seen in (await streams.run(abort)).values():
            assert (seen.end.kind, seen.end.detail) == (EndKind.ENDED, "Aborted")
            check(cluster, seen)
    await idle(cluster)


async def test_worker_that_refuses_the_abort(
    backend_of: Make, router: str, cluster: SimulatedCluster
) -> None:
    """One worker's refusal is a receipt of its own: the other's streams end, its own at the second try."""
    async with backend_of(router) as backend:
        streams = Streams(backend, 4, budget=20_000)
        cluster[0].inject(Fault(FaultKind.CONTROL_REFUSED, status=500, times=4))

        async def abort() -> None:
            there = await holding(cluster, 0, streams.rids)
            first = {each.worker: each for each in await backend.abort(streams.refs(), deadline=10)}
            assert first[cluster.urls[0]].status is REFUSED
            assert "HTTP 500" in (first[cluster.urls[0]].detail or "")
            assert first[cluster.urls[1]].status is ACCEPTED
            await anyio.to_thread.run_sync(cluster[1].wait_until, lambda brain: brain.idle)
            assert await holding(cluster, 0, streams.rids) == there != set()
            again = await backend.abort(streams.refs(), deadline=10)
            assert {each.status for each in again} == {ACCEPTED}

        for seen in (await streams.run(abort)).values():
            assert seen.end.kind is EndKind.ENDED
    await idle(cluster)


async def test_pause_and_label(backend_of: Make, router: str, cluster: SimulatedCluster) -> None:
    """Pausing, publishing a label and going on reach every worker; streams live through it and tell both labels."""
    async with backend_of(router) as backend:
        before = {each.version for each in await backend.workers(deadline=10)}
        assert len(before) == 1
        streams = Streams(backend, 2, budget=150)
        label = f"v-{uuid4().hex[:6]}"

        async def update() -> None:
            assert [each.status for each in await backend.pause(UpdateMode.IN_PLACE, deadline=10)] == [
                ACCEPTED
            ] * 2
            assert [each.version for each in await backend.resume(label, deadline=10)] == [label] * 2

        for seen in (await streams.run(update)).values():
            assert [span.version for span in seen.end.spans] == [*before, label]
            assert seen.end.spans[-1].end == len(seen.tokens) == 150
        receipts = await backend.workers(deadline=10)
        assert [(each.version, each.running, each.waiting) for each in receipts] == [(label, 0, 0)] * 2


async def test_tokenize(backend_of: Make, router: str) -> None:
    """Text is tokenised by a worker: the router answers 400."""
    async with backend_of(router) as backend:
        assert await backend.tokenize("Hello") == PROMPT


async def test_worker_killed_in_mid_stream(backend_of: Make, router: str, cluster: SimulatedCluster) -> None:
    """Streams of a dead worker are lost with their prefix, others go on; the prefix is continued elsewhere."""
    async with backend_of(router) as backend:
        streams = Streams(backend, 4, budget=120)
        gone: set[str] = set()

        async def kill() -> None:
            await backend.topology()
            gone.update(await holding(cluster, 0, streams.rids))
            await anyio.to_thread.run_sync(cluster[0].kill)

        try:
            ends = await streams.run(kill)
            receipts = {each.worker: each.status for each in await backend.workers(deadline=10)}
            assert receipts == {cluster.urls[0]: UNREACHABLE, cluster.urls[1]: ACCEPTED}
        finally:
            await anyio.to_thread.run_sync(cluster[0].restart)
        assert gone
        for rid, seen in ends.items():
            check(cluster, seen)
            lost = (EndKind.LOST, Reason.DISCONNECTED)
            assert (seen.end.kind, seen.end.reason) == (
                lost if rid in gone else (EndKind.FINISHED, Reason.LENGTH)
            )
        prefix = ends[gone.pop()].tokens
        assert 0 < len(prefix) < 120
        rest = Streams(backend, 1, budget=120 - len(prefix), prompts=[PROMPT + prefix])
        (seen,) = (await rest.run()).values()
        assert seen.end.kind is EndKind.FINISHED
        check(cluster, seen, PROMPT + prefix)
    await idle(cluster)
