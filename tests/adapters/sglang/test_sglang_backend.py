"""Streams over real TCP: every answer of a server becomes one end, on every transport."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import anyio
import httpx
import pytest

from adapters.sglang import SGLangBackend
from lifecycle.backend import Call
from lifecycle.errors import ConfigurationError
from lifecycle.events import Accepted, EndKind, StreamEvent
from lifecycle.states import Reason
from tests.support.scripted_server import (
    CERTIFICATE,
    STREAM_HEAD,
    Connection,
    Request,
    Script,
    ScriptedServer,
    answer,
    in_turn,
    raw,
    silence,
    stream,
)
from tests.support.sglang_chunks import RID, STOP, Seen, body, chunk, encode, event

pytestmark = pytest.mark.anyio
GOOD = (chunk([11], 1), chunk([12], 2), chunk([13], 3, finish=STOP))
LOST, REJECTED = EndKind.LOST, EndKind.REJECTED
Make = Callable[..., SGLangBackend]


def call(**fields: Any) -> Call:
    """One attempt."""
    return Call(
        **{"rid": RID, "rollout_id": "r", "attempt": 1, "input_ids": [1, 2], "sampling_params": {}, **fields}
    )


async def collect(backend: SGLangBackend, **fields: Any) -> tuple[list[Any], Seen]:
    """The batches of one stream, and all their events."""
    batches = [batch async for batch in backend.stream(call(**fields))]
    return batches, Seen([each for batch in batches for each in batch])


async def run(make: Make, script: Script, **settings: Any) -> Seen:
    """One stream from a server that does `script`."""
    async with ScriptedServer({"/generate": script}) as server, make(server.url, **settings) as backend:
        return (await collect(backend))[1]


async def test_stream(backend_of: Make) -> None:
    """Batches: the server's acceptance first, one per read, the end last."""
    async with ScriptedServer({"/generate": stream(*map(event, GOOD), event(b"[DONE]"))}) as server:
        async with backend_of(server.url, api_key="sk-1") as backend:
            batches, seen = await collect(backend, routing_key="g 1", extra={"priority": 2})
        assert batches[0] == (Accepted(None),)
        assert all(batches[1:])
        assert seen.tokens == [11, 12, 13]
        assert seen.end.kind is EndKind.FINISHED
        (request,) = server.asked("/generate")
        assert request.method == "POST"
        assert request.json()["rid"] == RID
        assert request.json()["priority"] == 2
        headers = request.headers
        assert headers["authorization"] == "Bearer sk-1"
        assert headers["accept-encoding"] == "identity"
        assert headers["content-type"] == "application/json"
        assert headers["x-smg-routing-key"] == "g%201"


async def test_acceptance_names_the_server(backend_of: Make) -> None:
    """Who serves a stream is told with its acceptance, and what a URL is is asked once."""
    scripts = {"/generate": stream(body(*GOOD)), "/model_info": answer(200, {"model_path": "tiny"})}
    async with ScriptedServer(scripts) as server, backend_of(server.url) as backend:
        for _ in range(2):
            batches, _ = await collect(backend)
            assert batches[0] == (Accepted(server.url),)
        assert len(server.asked("/model_info")) == 1
        assert backend.worker_of(RID) is None  # it is over
    assert backend.worker_of(RID) is None


async def test_first_streams_wait_for_one_answer(backend_of: Make) -> None:
    """Streams that begin together ask once what their URL is, and are all told."""
    together = anyio.Event()

    async def slow(request: Request, connection: Connection) -> None:
        await together.wait()
        await answer(404)(request, connection)

    async def generate(request: Request, connection: Connection) -> None:
        if len(server.asked("/generate")) == 3:
            together.set()
        await stream(body(*GOOD))(request, connection)

    workers: list[str | None] = []

    async def read(number: int) -> None:
        batches, _ = await collect(backend, rid=f"{number:032x}")
        workers.append(batches[0][0].worker)

    info = answer(200, {"model_path": "tiny"})
    scripts = {"/generate": generate, "/workers": slow, "/model_info": info}
    async with ScriptedServer(scripts) as server, backend_of(server.url) as backend:
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(read, number)
        assert workers == [server.url] * 3
        assert len(server.asked("/workers")) == 1


async def test_acceptance_does_not_wait_for_long(backend_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL that does not say what it is holds its streams up for a moment, once."""
    monkeypatch.setattr("adapters.sglang.backend.INTRODUCE_S", 0.1)
    scripts = {"/generate": stream(body(*GOOD)), "/workers": silence}
    async with ScriptedServer(scripts) as server, backend_of(server.url) as backend:
        for _ in range(3):
            batches, seen = await collect(backend)
            assert batches[0] == (Accepted(None),)
            assert seen.tokens == [11, 12, 13]
        assert len(server.asked("/workers")) == 1


async def test_connection_is_used_again(backend_of: Make) -> None:
    """After a whole stream its connection serves the next one."""
    async with (
        ScriptedServer({"/generate": stream(body(*GOOD))}) as server,
        backend_of(server.url) as backend,
    ):
        for _ in range(3):
            assert (await collect(backend))[1].tokens == [11, 12, 13]
        assert server.connections == 2  # one for streams, one to find out what the server is


async def test_connection_is_used_again_by_a_reader_that_leaves_at_the_end(backend_of: Make) -> None:
    """A reader may leave as soon as it has the end: the rest of the body is read on closing."""

    async def late(_: Request, connection: Connection) -> None:
        await connection.send(STREAM_HEAD)
        await connection.chunk(body(*GOOD, done=False))
        await ended.wait()
        await connection.chunk(event(b"[DONE]"))
        await connection.end()

    async with ScriptedServer({"/generate": late}) as server, backend_of(server.url) as backend:
        await backend.topology()
        before = server.connections
        for _ in range(3):
            ended = anyio.Event()
            async with aclosing(backend.stream(call())) as batches:
                async for batch in batches:
                    if Seen(batch).ends:
                        ended.set()
                        break
        assert server.connections == before + 1


async def test_first_batch_comes_with_the_header(backend_of: Make) -> None:
    """The server's acceptance is told before any token is there."""
    go = anyio.Event()

    async def slow(_: Request, connection: Connection) -> None:
        await connection.send(STREAM_HEAD)
        await go.wait()
        await connection.chunk(body(*GOOD))
        await connection.end()

    async with (
        ScriptedServer({"/generate": slow}) as server,
        backend_of(server.url) as backend,
        aclosing(backend.stream(call())) as batches,
    ):
        assert isinstance((await anext(batches))[0], Accepted)
        go.set()
        assert Seen(await anext(batches)).tokens


async def test_slow_header(backend_of: Make) -> None:
    """A header in small pieces is a header."""

    async def slow(_: Request, connection: Connection) -> None:
        for at in range(0, len(STREAM_HEAD), 7):
            await connection.send(STREAM_HEAD[at : at + 7])
            await anyio.lowlevel.checkpoint()
        await connection.chunk(body(*GOOD))
        await connection.end()

    assert (await run(backend_of, slow)).tokens == [11, 12, 13]


STATUSES = [
    (400, {"error": {"message": "bad"}}, REJECTED, Reason.REFUSED),
    (401, b"", REJECTED, Reason.REFUSED),
    (404, {"detail": "bad"}, REJECTED, Reason.REFUSED),
    (408, b"bad", LOST, Reason.SERVER_ERROR),
    (422, b"bad", REJECTED, Reason.REFUSED),
    (429, b"", LOST, Reason.RATE_LIMITED),
    (500, {"error": "bad"}, LOST, Reason.SERVER_ERROR),
    (502, b"<html>bad</html>", LOST, Reason.UNAVAILABLE),
    (503, {"object": "error", "message": "bad"}, LOST, Reason.UNAVAILABLE),
    (504, b"bad", LOST, Reason.UNAVAILABLE),
    (307, b"bad", REJECTED, Reason.REFUSED),
]


@pytest.mark.parametrize(
    ("status", "words", "kind", "reason"), STATUSES, ids=[str(row[0]) for row in STATUSES]
)
async def test_status(backend_of: Make, status: int, words: Any, kind: EndKind, reason: Reason) -> None:
    """The status decides, although a router calls every body an event stream."""
    seen = await run(backend_of, answer(status, words, "text/event-stream"))
    assert (seen.end.kind, seen.end.reason, seen.end.status) == (kind, reason, status)
    assert ("bad" if words else f"HTTP {status}") in (seen.end.detail or "")
    assert seen.tokens == []


@pytest.mark.parametrize("kind", ["text/html", "application/json"])
async def test_not_an_event_stream(backend_of: Make, kind: str) -> None:
    """A 200 that is no event stream is malformed, and says what it is."""
    seen = await run(backend_of, answer(200, b"<h1>Welcome</h1>", kind))
    assert (seen.end.kind, seen.end.reason) == (REJECTED, Reason.MALFORMED)
    assert kind in (seen.end.detail or "")
    assert "Welcome" in (seen.end.detail or "")


async def test_no_content_type(backend_of: Make) -> None:
    """A 200 without a content type is read as what was asked for."""
    data = body(*GOOD)
    plain = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)
    assert (await run(backend_of, raw(plain))).tokens == [11, 12, 13]


@pytest.mark.parametrize(
    ("script", "reason", "tokens"),
    [
        (stream(event(GOOD[0]), cut=True), Reason.DISCONNECTED, [11]),
        (stream(event(GOOD[0]), b'data: {"te', cut=True), Reason.DISCONNECTED, [11]),
        (stream(cut=True), Reason.DISCONNECTED, []),
        (raw(b""), Reason.DISCONNECTED, []),
        (raw(b"HTTP/1.1 200"), Reason.DISCONNECTED, []),
        (raw(b"\x00\x01\x02 no HTTP at all\r\n\r\n"), Reason.DISCONNECTED, []),
        (stream(event(GOOD[0])), Reason.TRUNCATED, [11]),
        (stream(event(GOOD[0]), b'data: {"te'), Reason.TRUNCATED, [11]),
        (stream(event(GOOD[0]), event(b"[DONE]")), Reason.TRUNCATED, [11]),
        (stream(), Reason.TRUNCATED, []),
    ],
    ids=[
        "cut between events",
        "cut in an event",
        "cut after the header",
        "cut before the header",
        "cut in the header",
        "no HTTP",
        "no terminal chunk",
        "cut-off JSON",
        "[DONE] too early",
        "empty",
    ],
)
async def test_lost(backend_of: Make, script: Script, reason: Reason, tokens: list[int]) -> None:
    """A stream without a terminal chunk is lost, with what it had shown."""
    seen = await run(backend_of, script)
    assert (seen.end.kind, seen.end.reason, seen.tokens) == (LOST, reason, tokens)
    assert seen.end.detail


async def test_content_length_not_reached(backend_of: Make) -> None:
    """A body shorter than announced is cut."""
    data = event(GOOD[0])
    short = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9999\r\n\r\n" + data
    seen = await run(backend_of, raw(short))
    assert (seen.end.reason, seen.tokens) == (Reason.DISCONNECTED, [11])


async def test_nobody_listens(backend_of: Make) -> None:
    """A refused connection is unreachable, and the URL is named."""
    async with ScriptedServer() as gone:
        url = gone.url
    async with backend_of(url) as backend:
        batches, seen = await collect(backend)
    assert (seen.end.kind, seen.end.reason) == (LOST, Reason.UNREACHABLE)
    assert url in (seen.end.detail or "")
    assert len(batches) == 1


async def test_host_that_cannot_be_looked_up(backend_of: Make) -> None:
    """A name that no resolver takes is unreachable, not an exception."""
    async with backend_of(f"http://{'x' * 70}.invalid:1") as backend:
        seen = (await collect(backend))[1]
    assert (seen.end.kind, seen.end.reason) == (LOST, Reason.UNREACHABLE)


async def test_garbage(backend_of: Make) -> None:
    """A chunk that cannot be true ends the stream as malformed, and the connection with it."""
    gone = anyio.Event()

    async def script(_: Request, connection: Connection) -> None:
        await connection.send(STREAM_HEAD)
        await connection.chunk(event(chunk([11], 5)))
        await connection.gone()
        gone.set()

    async with ScriptedServer({"/generate": script}) as server, backend_of(server.url) as backend:
        seen = (await collect(backend))[1]
        assert (seen.end.kind, seen.end.reason) == (REJECTED, Reason.MALFORMED)
        with anyio.fail_after(5):
            await gone.wait()


async def test_error_chunk(backend_of: Make) -> None:
    """An error inside a 200 is a refusal."""
    error = encode({"error": {"message": "too long", "code": 400}})
    seen = await run(backend_of, stream(body(error)))
    assert (seen.end.kind, seen.end.reason, seen.end.detail) == (REJECTED, Reason.REFUSED, "too long")


async def test_event_limit(backend_of: Make) -> None:
    """An event without end is cut off at the limit."""
    seen = await run(backend_of, stream(*[b"data: " + b"x" * 500] * 10), event_limit=1000)
    assert (seen.end.reason, seen.end.detail) == (Reason.MALFORMED, "an event of more than 1000 bytes")


@pytest.mark.parametrize("how", ["break", "cancel"])
async def test_leaving_early_closes_the_connection(backend_of: Make, how: str) -> None:
    """A stream that is given up is closed at once, however its reader leaves."""
    gone = anyio.Event()

    async def script(_: Request, connection: Connection) -> None:
        await connection.send(STREAM_HEAD)
        await connection.chunk(event(GOOD[0]))
        await connection.gone()
        gone.set()

    async def read(backend: SGLangBackend, started: anyio.Event) -> None:
        async with aclosing(backend.stream(call())) as batches:
            async for batch in batches:
                if Seen(batch).tokens:
                    started.set()
                    if how == "break":
                        break

    async with ScriptedServer({"/generate": script}) as server, backend_of(server.url) as backend:
        async with anyio.create_task_group() as tasks:
            started = anyio.Event()
            tasks.start_soon(read, backend, started)
            await started.wait()
            if how == "cancel":
                tasks.cancel_scope.cancel()
        with anyio.fail_after(5):
            await gone.wait()


async def test_cancelled_before_the_header(backend_of: Make) -> None:
    """A request that is cancelled while it waits for its header is closed as well."""
    there, gone = anyio.Event(), anyio.Event()

    async def mute(_: Request, connection: Connection) -> None:
        there.set()
        await connection.gone()
        gone.set()

    async with ScriptedServer({"/generate": mute}) as server, backend_of(server.url) as backend:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, backend)
            await there.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(5):
            await gone.wait()


async def test_closing_the_backend_ends_its_streams(backend_of: Make) -> None:
    """A stream that is open when the backend closes is lost, not left hanging."""

    async def script(_: Request, connection: Connection) -> None:
        await connection.send(STREAM_HEAD)
        await connection.chunk(event(GOOD[0]))
        await connection.gone()

    async def read(events: list[StreamEvent], started: anyio.Event) -> None:
        async for batch in backend.stream(call()):
            events.extend(batch)
            if Seen(events).tokens:
                started.set()

    async with ScriptedServer({"/generate": script}) as server:
        backend = backend_of(server.url)
        events: list[StreamEvent] = []
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks, backend:
                started = anyio.Event()
                tasks.start_soon(read, events, started)
                await started.wait()
        assert Seen(events).end.reason is Reason.DISCONNECTED


async def test_slow_reader_is_backpressure(backend_of: Make) -> None:
    """A stream that outruns its reader is held up by TCP, not collected without bound."""
    sent = 0
    big = event(b"x" * 60_000)

    async def flood(_: Request, connection: Connection) -> None:
        nonlocal sent
        await connection.send(STREAM_HEAD)
        while True:
            await connection.chunk(big)
            sent += len(big)

    async with (
        ScriptedServer({"/generate": flood}) as server,
        backend_of(server.url) as backend,
        aclosing(backend.stream(call())) as batches,
    ):
        assert isinstance((await anext(batches))[0], Accepted)
        before, still = -1, 0
        with anyio.fail_after(20):
            while still < 5:  # until nothing more goes out
                before, still = sent, still + 1 if sent == before else 0
                await anyio.sleep(0.02)
        assert 0 < sent < 16_000_000


async def test_several_servers_take_turns(backend_of: Make) -> None:
    """Calls go round; a server that refuses is passed over, and asked again later."""
    async with ScriptedServer({"/generate": stream(body(*GOOD))}) as one, ScriptedServer() as two:
        await two.stop()
        async with backend_of([one.url, two.url]) as backend:
            reasons = [(await collect(backend))[1].end.reason for _ in range(5)]
        assert reasons == [Reason.STOP, Reason.UNREACHABLE, Reason.STOP, Reason.STOP, Reason.STOP]


async def test_retries_are_not_made_here(backend_of: Make) -> None:
    """An attempt is one request, whatever comes back."""
    script = in_turn(answer(503), stream(body(*GOOD)))
    async with ScriptedServer({"/generate": script}) as server, backend_of(server.url) as backend:
        assert (await collect(backend))[1].end.reason is Reason.UNAVAILABLE
        assert len(server.asked("/generate")) == 1


async def test_unsendable_request(backend_of: Make) -> None:
    """What JSON cannot hold is refused before it is sent."""
    async with ScriptedServer() as server, backend_of(server.url) as backend:
        seen = (await collect(backend, extra={"custom": object()}))[1]
        assert (seen.end.kind, seen.end.reason) == (REJECTED, Reason.REFUSED)
        assert "object" in (seen.end.detail or "")
        assert server.requests == []


async def test_text(backend_of: Make) -> None:
    """With text=True the slices carry text."""
    script = stream(body(chunk([11], 1, text="Hi"), chunk([12], 2, text=" you", finish=STOP)))
    assert (await run(backend_of, script, text=True)).text == "Hi you"


async def test_channels(backend_of: Make) -> None:
    """What a request asks for beside logprobs is passed on."""
    payload = chunk([11], 1, finish=STOP, output_top_logprobs=[[[-0.1, 11, None]]])
    async with (
        ScriptedServer({"/generate": stream(body(payload))}) as server,
        backend_of(server.url) as backend,
    ):
        seen = (await collect(backend, extra={"top_logprobs_num": 1}))[1]
    assert [each.name for each in seen.channels] == ["output_top_logprobs"]


async def test_error_body_without_end(backend_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error whose body never ends is an error all the same."""
    monkeypatch.setattr("adapters.sglang.backend.ERROR_BODY_S", 0.2)

    async def script(_: Request, connection: Connection) -> None:
        await connection.send(
            b"HTTP/1.1 503 No\r\ncontent-type: text/plain\r\ncontent-length: 100\r\n\r\nbusy"
        )
        await connection.gone()

    seen = await run(backend_of, script)
    assert (seen.end.reason, seen.end.detail) == (Reason.UNAVAILABLE, "busy")


async def test_error_body_that_breaks_off(backend_of: Make) -> None:
    """An error whose body is cut tells what it had told."""
    seen = await run(backend_of, raw(b"HTTP/1.1 500 No\r\ncontent-length: 100\r\n\r\noops"))
    assert (seen.end.reason, seen.end.status) == (Reason.SERVER_ERROR, 500)


async def test_server_that_keeps_the_body_open(backend_of: Make) -> None:
    """A body that stays open after the terminal chunk holds the stream up for a moment only."""

    async def script(_: Request, connection: Connection) -> None:
        await connection.send(STREAM_HEAD)
        await connection.chunk(body(*GOOD, done=False))
        await connection.gone()

    with anyio.fail_after(5):
        assert (await run(backend_of, script)).end.kind is EndKind.FINISHED


async def test_key_appears_nowhere(backend_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A key is in no event, no exception and no log line, even where the server repeats it."""
    key = "sk-top-secret"
    caplog.set_level(logging.DEBUG)
    scripts = {
        "/generate": answer(401, f"bad key {key}".encode()),
        "/abort_request": answer(401, key.encode()),
    }
    async with ScriptedServer(scripts) as server, backend_of(server.url, api_key=key) as backend:
        events = (await collect(backend))[1].events
        told = [events, await backend.health(deadline=5), repr(backend), await backend.topology()]
        await server.stop()
        told.append((await collect(backend))[1].events)
    assert server.requests[0].headers["authorization"] == f"Bearer {key}"
    assert key not in repr(told)
    assert key not in caplog.text


class TestUse:
    """Opening and choosing."""

    async def test_not_open(self, backend_of: Make) -> None:
        """A backend that was not entered says so."""
        backend = backend_of("http://h:1")
        with pytest.raises(ConfigurationError, match="async with SGLangBackend"):
            await collect(backend)
        with pytest.raises(ConfigurationError, match="is not open"):
            await backend.topology()

    async def test_opened_twice(self, backend_of: Make) -> None:
        """It cannot be entered twice at a time, but again after it was closed."""
        backend = backend_of("http://h:1")
        async with backend:
            with pytest.raises(ConfigurationError, match="open already"):
                await backend.__aenter__()
        async with backend:
            pass

    async def test_auto(self, anyio_backend: str) -> None:
        """On asyncio the fast transport is chosen, elsewhere the plain one."""
        async with SGLangBackend("http://h:1") as backend:
            assert backend.transport == ("fast" if anyio_backend == "asyncio" else "httpx")

    async def test_auto_without_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the extra the plain transport is chosen; asking for the other names the install command."""
        monkeypatch.setattr("adapters.sglang.settings.find_spec", lambda _: None)
        async with SGLangBackend("http://h:1") as backend:
            assert backend.transport == "httpx"
        with pytest.raises(ConfigurationError, match=r"pip install 'rollout-lifecycle\[fast\]'"):
            await SGLangBackend("http://h:1", transport="fast").__aenter__()

    async def test_fast_needs_asyncio(self, anyio_backend: str) -> None:
        """The fast transport on trio is refused with a way out."""
        if anyio_backend == "asyncio":
            return
        with pytest.raises(ConfigurationError, match="use transport='httpx'"):
            await SGLangBackend("http://h:1", transport="fast").__aenter__()

    async def test_client_of_the_caller(self) -> None:
        """A client of the caller's is used for streams, and left open."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, headers={"x-mine": "yes"}, timeout=0.001) as client:
            async with ScriptedServer({"/generate": stream(body(*GOOD))}) as server:
                async with SGLangBackend(server.url, client=client) as backend:
                    assert backend.transport == "httpx"
                    assert (await collect(backend))[1].tokens == [11, 12, 13]
                assert server.requests[0].headers["x-mine"] == "yes"
            assert not client.is_closed

    async def test_client_with_a_low_limit(self) -> None:
        """A client that cannot hold the streams is refused, and the message says what would do."""
        async with httpx.AsyncClient() as client:
            with pytest.raises(
                ConfigurationError, match=r"allows 100 connections, but 512 .*max_connections=None"
            ):
                SGLangBackend("http://h:1", client=client)
            async with SGLangBackend("http://h:1", client=client, max_connections=50):
                pass

    async def test_client_of_another_kind(self) -> None:
        """Something that is no httpx client is refused by its type; with the fast transport none can be given."""
        with pytest.raises(ConfigurationError, match=r"must be an httpx.AsyncClient, not int"):
            SGLangBackend("http://h:1", client=3)
        with pytest.raises(ConfigurationError, match="cannot be used with transport='fast'"):
            SGLangBackend("http://h:1", client=3, transport="fast")

    async def test_https(self, backend_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        """Streams over TLS, once the server's certificate is trusted; never before that."""
        async with ScriptedServer({"/generate": stream(*map(event, GOOD))}, tls=True) as server:
            async with backend_of(server.url) as backend:
                _, seen = await collect(backend)
                assert (seen.end.kind, seen.end.reason) == (LOST, Reason.UNREACHABLE)
                assert "certificate verify failed" in (seen.end.detail or "").lower().replace("_", " ")
                assert server.requests == []
            monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
            async with backend_of(server.url) as backend:
                for _ in range(3):
                    assert (await collect(backend))[1].tokens == [11, 12, 13]
            assert len(server.asked("/generate")) == 3

    async def test_many_streams_at_once(self, backend_of: Make) -> None:
        """More streams than one pool holds run side by side."""
        together = anyio.Event()
        waiting = 0

        async def script(_: Request, connection: Connection) -> None:
            nonlocal waiting
            await connection.send(STREAM_HEAD)
            waiting += 1
            if waiting == 150:
                together.set()
            await together.wait()
            await connection.chunk(body(*GOOD))
            await connection.end()

        ends: list[EndKind] = []

        async def read(backend: SGLangBackend, number: int) -> None:
            ends.append((await collect(backend, rid=f"{number:032x}"))[1].end.kind)

        async with ScriptedServer({"/generate": script}) as server, backend_of(server.url) as backend:
            with anyio.fail_after(30):
                async with anyio.create_task_group() as tasks:
                    for number in range(150):
                        tasks.start_soon(read, backend, number)
        assert ends == [EndKind.FINISHED] * 150
