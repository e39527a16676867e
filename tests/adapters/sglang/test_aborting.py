"""Aborts: who is asked, what they answer, and that nothing of others is touched."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import anyio
import pytest

from adapters.sglang import SGLangBackend
from adapters.sglang.aborting import AT_ONCE
from adapters.sglang.live import LiveStreams
from lifecycle.backend import Call, CallRef, ReceiptStatus
from lifecycle.events import EndKind, StreamEnd, StreamEvent
from lifecycle.states import Reason
from tests.support.scripted_server import (
    STREAM_HEAD,
    Connection,
    Request,
    Script,
    ScriptedServer,
    answer,
    silence,
)
from tests.support.sglang_chunks import Seen, chunk, event

pytestmark = pytest.mark.anyio
ACCEPTED, REFUSED, UNREACHABLE = ReceiptStatus.ACCEPTED, ReceiptStatus.REFUSED, ReceiptStatus.UNREACHABLE
ABORT = "/abort_request"
OK = answer(200)
INFO = answer(200, {"model_path": "tiny"})


def ref(rid: str, worker: str | None = None) -> CallRef:
    """One attempt."""
    return CallRef(rid, f"rollout-{rid}", 1, worker)


def call(rid: str) -> Call:
    """One attempt, ready to send."""
    return Call(rid, f"rollout-{rid}", 1, [1, 2], {"max_new_tokens": 9})


async def endless(_: Request, connection: Connection) -> None:
    """A stream that shows one token and then waits for the client to go."""
    await connection.send(STREAM_HEAD)
    await connection.chunk(event(chunk([11], 1)))
    await connection.gone()


@asynccontextmanager
async def behind(
    backend_of: Callable[..., SGLangBackend], *workers: dict[str, Script], **settings: Any
) -> AsyncIterator[tuple[ScriptedServer, list[ScriptedServer], SGLangBackend]]:
    """Scripted workers behind a scripted router, which streams."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ScriptedServer(dict(scripts))) for scripts in workers]
        listed = {"workers": [{"url": f"{server.url}@{n}"} for n, server in enumerate(servers)]}
        router = await stack.enter_async_context(
            ScriptedServer({"/workers": answer(200, listed), "/generate": endless})
        )
        yield router, servers, await stack.enter_async_context(backend_of(router.url, **settings))


async def read(backend: SGLangBackend, rid: str, into: list[StreamEvent], started: anyio.Event) -> None:
    """Read a stream to its end."""
    async with aclosing(backend.stream(call(rid))) as batches:
        async for batch in batches:
            into.extend(batch)
            if Seen(into).tokens:
                started.set()


@asynccontextmanager
async def reading(backend: SGLangBackend, *rids: str) -> AsyncIterator[dict[str, list[StreamEvent]]]:
    """Streams that are open; waits for their ends on leaving."""
    events: dict[str, list[StreamEvent]] = {rid: [] for rid in rids}
    async with anyio.create_task_group() as tasks:
        for rid in rids:
            started = anyio.Event()
            tasks.start_soon(read, backend, rid, events[rid], started)
            await started.wait()
        yield events


async def test_every_worker_behind_a_router(backend_of: Callable[..., SGLangBackend]) -> None:
    """A router hides the worker: each is asked, by its own rid alone, and one failure hides no success."""
    async with behind(backend_of, {ABORT: OK}, {ABORT: answer(401, b"no key")}, {ABORT: OK}) as (
        _,
        servers,
        backend,
    ):
        receipts = await backend.abort([ref("a"), ref("b")], deadline=5)
        assert [(each.worker, each.status, each.rids, each.requests) for each in receipts] == [
            (servers[0].url, ACCEPTED, ("a", "b"), 2),
            (servers[1].url, REFUSED, ("a", "b"), 2),
            (servers[2].url, ACCEPTED, ("a", "b"), 2),
        ]
        assert receipts[1].detail == "HTTP 401: no key"
        assert all(each.strategy == "fanout" and each.latency_s > 0 for each in receipts)
        bodies = sorted((request.json() for request in servers[0].requests), key=lambda body: body["rid"])
        assert bodies == [{"rid": "a", "abort_all": False}, {"rid": "b", "abort_all": False}]


async def test_a_known_worker_alone(backend_of: Callable[..., SGLangBackend]) -> None:
    """Where the worker is known nobody else is asked."""
    async with behind(backend_of, {ABORT: OK}, {ABORT: OK}) as (router, servers, backend):
        receipts = await backend.abort([ref("a", servers[1].url)], deadline=5)
        assert [each.worker for each in receipts] == [servers[1].url]
        assert (servers[0].requests, router.requests) == ([], [])


async def test_nothing_to_abort(backend_of: Callable[..., SGLangBackend]) -> None:
    """No calls, no requests."""
    async with behind(backend_of, {ABORT: OK}) as (_, servers, backend):
        assert await backend.abort([], deadline=5) == []
        assert servers[0].requests == []


async def test_dead_worker_is_tried_once(backend_of: Callable[..., SGLangBackend]) -> None:
    """A worker that does not answer costs one time-out, not one per request."""
    async with behind(backend_of, {ABORT: OK}, {ABORT: OK}) as (_, servers, backend):
        await backend.topology()
        await servers[1].stop()
        rids = [f"{n:032x}" for n in range(100)]
        alive, dead = sorted(
            await backend.abort([ref(rid) for rid in rids], deadline=30), key=lambda each: each.status
        )
        assert (alive.status, len(alive.rids), alive.requests) == (ACCEPTED, 100, 100)
        assert (dead.status, len(dead.rids)) == (UNREACHABLE, 100)
        assert dead.requests <= AT_ONCE


async def test_deadline(backend_of: Callable[..., SGLangBackend]) -> None:
    """A worker that stays silent is unreachable when the deadline passes."""
    async with behind(backend_of, {ABORT: silence}) as (_, __, backend):
        with anyio.fail_after(5):
            (receipt,) = await backend.abort([ref("a")], deadline=0.3)
        assert receipt.status is UNREACHABLE
        assert "no answer within" in (receipt.detail or "")


async def test_deadline_while_asking_the_router(backend_of: Callable[..., SGLangBackend]) -> None:
    """The deadline holds for finding the workers, too."""
    async with ScriptedServer({"/workers": silence}) as router, backend_of(router.url) as backend:
        with anyio.fail_after(5):
            (receipt,) = await backend.abort([ref("a")], deadline=0.3)
        assert receipt.status is UNREACHABLE


async def test_router_without_workers(backend_of: Callable[..., SGLangBackend]) -> None:
    """Nobody to ask is a receipt, too, and so is a worker that speaks no HTTP."""
    listed = answer(200, {"workers": [{"url": "grpc://c:3"}]})
    async with ScriptedServer({"/workers": listed}) as router, backend_of(router.url) as backend:
        receipts = await backend.abort([ref("a")], deadline=5)
        assert [(each.worker, each.status, each.requests) for each in receipts] == [
            ("grpc://c:3", UNREACHABLE, 0),
            (router.url, UNREACHABLE, 0),
        ]


async def test_several_servers(backend_of: Callable[..., SGLangBackend]) -> None:
    """A stream's own server is asked; for a rid of an earlier process, every server."""
    scripts = {"/generate": endless, ABORT: OK, "/model_info": INFO}
    async with (
        ScriptedServer(scripts) as one,
        ScriptedServer(scripts) as two,
        backend_of([one.url, two.url]) as backend,
        reading(backend, "a"),
    ):
        assert backend.worker_of("a") == one.url
        assert [each.worker for each in await backend.abort([ref("a")], deadline=5)] == [one.url]
        assert [each.worker for each in await backend.abort([ref("old")], deadline=5)] == [one.url, two.url]
        await backend.aclose()


async def test_repeated_abort_asks_the_router_again(
    backend_of: Callable[..., SGLangBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort that ended nothing may have missed a new worker: the list is fetched again."""
    monkeypatch.setattr("adapters.sglang.topology.REFRESH_S", 0.0)
    async with behind(backend_of, {ABORT: OK}, {ABORT: OK}) as (router, servers, backend):
        listed = router.scripts["/workers"]
        router.scripts["/workers"] = answer(200, {"urls": [servers[0].url]})
        async with reading(backend, "a"):
            assert len(await backend.abort([ref("a")], deadline=5)) == 1
            router.scripts["/workers"] = listed
            assert len(await backend.abort([ref("a")], deadline=5)) == 2
            await backend.aclose()


class TestClose:
    """Ending streams by closing them."""

    async def test_strategy(self, backend_of: Callable[..., SGLangBackend]) -> None:
        """The stream is lost with its tokens kept; no worker is asked anything."""
        async with behind(backend_of, {ABORT: OK}, strategy="close") as (router, servers, backend):
            async with reading(backend, "a", "b") as events:
                (receipt,) = await backend.abort([ref("a"), ref("nobody")], deadline=5)
                assert (receipt.strategy, receipt.requests, receipt.rids) == ("close", 0, ("a",))
                assert (receipt.worker, receipt.status) == (router.url, ACCEPTED)
                while not any(isinstance(each, StreamEnd) for each in events["a"]):
                    await anyio.lowlevel.checkpoint()
                assert Seen(events["b"]).ends == []
                await backend.abort([ref("b")], deadline=5)
            seen = Seen(events["a"])
            assert (seen.tokens, seen.end.kind, seen.end.reason) == ([11], EndKind.LOST, Reason.DISCONNECTED)
            assert seen.end.detail == "closed from this side"
            assert servers[0].requests == []

    async def test_before_the_answer(self, backend_of: Callable[..., SGLangBackend]) -> None:
        """A stream whose header never came can be closed as well."""
        waiting = anyio.Event()
        left = anyio.Event()

        async def mute(_: Request, connection: Connection) -> None:
            waiting.set()
            await connection.gone()
            left.set()

        async with (
            ScriptedServer({"/generate": mute}) as server,
            backend_of(server.url, strategy="close") as backend,
        ):
            events: list[StreamEvent] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, backend, "a", events, anyio.Event())
                await waiting.wait()
                await backend.abort([ref("a")], deadline=5)
            assert Seen(events).end.kind is EndKind.LOST
            with anyio.fail_after(5):
                await left.wait()

    async def test_too_many_for_a_fanout(
        self, backend_of: Callable[..., SGLangBackend], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By default, what would take too many requests is closed instead; `fanout` insists."""
        monkeypatch.setattr("adapters.sglang.aborting.FANOUT_LIMIT", 1)
        async with behind(backend_of, {ABORT: OK}, {ABORT: OK}) as (_, servers, backend):
            async with reading(backend, "a"):
                (receipt,) = await backend.abort([ref("a")], deadline=5)
            assert receipt.strategy == "close"
            assert servers[0].requests == []
        async with behind(backend_of, {ABORT: OK}, {ABORT: OK}, strategy="fanout") as (_, servers, backend):
            assert len(await backend.abort([ref("a")], deadline=5)) == 2


async def test_one_rid_twice() -> None:
    """Two streams of one rid do not get in each other's way here: the later one is the one that counts."""
    live = LiveStreams()
    first, second = live.add("a", "http://h"), live.add("a", "http://h")
    live.remove(first)
    assert live.get("a") is second
    assert len(live) == 1
    live.remove(second)
    assert live.all() == []


async def test_given_workers_that_refuse(backend_of: Callable[..., SGLangBackend]) -> None:
    """A failure casts no doubt on workers that the caller named: nobody else is asked."""
    async with ScriptedServer({ABORT: answer(500)}) as server:
        async with backend_of("http://127.0.0.1:9", workers=[f"{server.url}@0"]) as backend:
            for _ in range(2):
                (receipt,) = await backend.abort([ref("a")], deadline=5)
                assert (receipt.worker, receipt.status) == (server.url, REFUSED)
        assert server.paths() == [ABORT, ABORT]


class TestEverything:
    """`abort_all`, only when asked for by name."""

    async def test_once_per_worker(self, backend_of: Callable[..., SGLangBackend]) -> None:
        """Each worker gets one request that ends all it holds."""
        async with behind(backend_of, {ABORT: OK}, {ABORT: answer(500)}) as (_, servers, backend):
            receipts = await backend.abort([ref("a"), ref("b")], deadline=5, everything=True)
            assert [(each.strategy, each.status, each.rids, each.requests) for each in receipts] == [
                ("abort_all", ACCEPTED, ("a", "b"), 1),
                ("abort_all", REFUSED, ("a", "b"), 1),
            ]
            assert [request.json() for request in servers[0].requests] == [{"abort_all": True}]

    async def test_without_calls(self, backend_of: Callable[..., SGLangBackend]) -> None:
        """It needs no calls of ours."""
        async with behind(backend_of, {ABORT: OK}) as (_, servers, backend):
            await backend.abort([], deadline=5, everything=True)
            assert len(servers[0].requests) == 1

    async def test_no_workers(self, backend_of: Callable[..., SGLangBackend]) -> None:
        """A router without workers says so here as well."""
        async with behind(backend_of) as (router, _, backend):
            (receipt,) = await backend.abort([], deadline=5, everything=True)
            assert (receipt.worker, receipt.status) == (router.url, UNREACHABLE)
