"""The plain transport by itself: what the tests of the backend, which run over every transport, do not reach."""

from __future__ import annotations

import gc
import ssl
from collections.abc import AsyncIterator

import anyio
import httpcore
import pytest

from adapters.sglang.pools import OwnPool, _TakenBody
from adapters.sglang.sockets import TapBackend
from adapters.sglang.transport import HttpxTransport, Response, StreamCut
from tests.support.scripted_server import (
    Connection,
    Request,
    Script,
    ScriptedServer,
    answer,
    in_turn,
    mute,
    raw,
    stream,
)

pytestmark = pytest.mark.anyio
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """It runs on both."""
    return request.param


@pytest.fixture
async def transport() -> AsyncIterator[HttpxTransport]:
    """One transport."""
    transport = HttpxTransport(connect_timeout=5.0)
    yield transport
    await transport.aclose()
    gc.collect()  # a socket left open would be a ResourceWarning, and that an error


async def get(transport: HttpxTransport, url: str) -> tuple[bytes, bool]:
    """One whole answer, and whether its body was taken past the parser."""
    response = await transport.open("GET", url, None, {})
    try:
        body = b""
        while data := await response.read():
            body += data
        assert await response.read() == b""
        return body, isinstance(response._chunks, _TakenBody)
    finally:
        await response.close()


async def exchange(transport: HttpxTransport, *scripts: Script) -> tuple[list[tuple[bytes, bool]], int]:
    """Some answers, one after the other, and how many connections they took."""
    async with ScriptedServer({"/x": in_turn(*scripts)}) as server:
        bodies = [await get(transport, server.url + "/x") for _ in scripts]
        return bodies, server.connections


async def test_a_connection_is_used_again_after_a_taken_body(transport: HttpxTransport) -> None:
    """Taken and parsed bodies follow each other on one connection."""
    scripts = stream(b"a", b"b"), answer(404, b"c"), stream(), stream(b"d" * 100_000), answer(200)
    said = [(b"ab", True), (b"c", False), (b"", True), (b"d" * 100_000, True), (b"", False)]
    assert await exchange(transport, *scripts) == (said, 1)


async def test_header_and_body_in_one_read(transport: HttpxTransport) -> None:
    """What came with the header belongs to the body; a trailer to nobody."""
    whole = raw(CHUNKED + b"3\r\none\r\n3\r\ntwo\r\n0\r\nx: 1\r\n\r\n")
    assert (await exchange(transport, whole))[0] == [(b"onetwo", True)]


async def test_header_in_pieces() -> None:
    """A header may come byte by byte, also the empty line that ends it."""
    raw_bytes = CHUNKED + b"2\r\nok\r\n0\r\n\r\n"
    parts = httpcore.AsyncMockBackend([bytes([byte]) for byte in raw_bytes])
    pool = OwnPool(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), 1.0, TapBackend(parts))
    said = await pool.send("GET", "http://127.0.0.1:1/x", None, {})
    assert isinstance(said.chunks, _TakenBody)
    assert [chunk async for chunk in said.chunks] == [b"o", b"k"]
    await said.aclose()
    await pool.aclose()


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (b"HTTP/1.1 103 Early\r\nx: 1\r\n\r\n" + CHUNKED, b"2\r\nok\r\n0\r\n\r\n"),
        (CHUNKED.replace(b"\r\n", b"\n"), b"2\r\nok\r\n0\r\n\r\n"),
        (b"HTTP/1.0 200 OK\r\n\r\n", b"ok"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b"ok"),
    ],
    ids=["interim", "bare line feeds", "until the end", "length"],
)
async def test_other_answers(transport: HttpxTransport, header: bytes, body: bytes) -> None:
    """Whatever the header looks like, the body is whole."""
    assert [said for said, _ in (await exchange(transport, raw(header + body)))[0]] == [b"ok"]


async def test_an_interim_answer_leaves_the_body_to_the_parser(transport: HttpxTransport) -> None:
    """Behind it the parser may have read into the body."""
    both = raw(b"HTTP/1.1 103 Early\r\n\r\n" + CHUNKED + b"2\r\nok\r\n0\r\n\r\n")
    assert (await exchange(transport, both))[0] == [(b"ok", False)]


@pytest.mark.parametrize(
    ("bytes_", "why"),
    [
        (b"no HTTP\r\n\r\n", "illegal status line"),
        (CHUNKED + b"zz\r\nabc\r\n", "not the size of a chunk"),
        (CHUNKED + b"1\r\nabc\r\n", "longer than its size"),
        (CHUNKED + b"3\r\nab", "peer closed connection without sending complete message body"),
        (CHUNKED + b"3\r\nabc\r\n", "peer closed connection without sending complete message body"),
        (CHUNKED, "peer closed connection without sending complete message body"),
    ],
)
async def test_broken_answers(transport: HttpxTransport, bytes_: bytes, why: str) -> None:
    """What is not HTTP, or does not come to its end, is a cut stream."""
    async with ScriptedServer({"/x": raw(bytes_)}) as server:
        with pytest.raises(StreamCut, match=why):
            await get(transport, server.url + "/x")


async def test_a_body_given_up_closes_the_connection(transport: HttpxTransport) -> None:
    """A stream that is closed half-way is gone for the server; the next one has a connection of its own."""
    gone = anyio.Event()

    async def script(_: Request, connection: Connection) -> None:
        await connection.send(CHUNKED)
        await connection.chunk(b"a")
        await connection.gone()
        gone.set()

    async with ScriptedServer({"/x": in_turn(script, stream(b"b"))}) as server:
        response = await transport.open("GET", server.url + "/x", None, {})
        assert await response.read() == b"a"
        await response.close()
        with anyio.fail_after(5):
            await gone.wait()
        assert await get(transport, server.url + "/x") == (b"b", True)
        assert server.connections == 2


async def test_close_wakes_a_reader(transport: HttpxTransport) -> None:
    """Closing a response ends a read that waits."""
    async with ScriptedServer({"/x": mute}) as server:
        response = await transport.open("GET", server.url + "/x", None, {})
        async with anyio.create_task_group() as tasks:

            async def close() -> None:
                await anyio.wait_all_tasks_blocked()
                await response.close()

            tasks.start_soon(close)
            with anyio.fail_after(5), pytest.raises(StreamCut):
                await response.read()


@pytest.mark.parametrize(
    "behind", [CHUNKED + b"3\r\nbad\r\n0\r\n\r\n", b"\r\n"], ids=["an answer", "a line break"]
)
async def test_bytes_behind_the_end_close_the_connection(transport: HttpxTransport, behind: bytes) -> None:
    """Whatever follows an answer unasked is nobody's answer, however long the server stays."""

    async def script(_: Request, connection: Connection) -> None:
        await connection.send(CHUNKED + b"1\r\na\r\n0\r\n\r\n" + behind)

    assert await exchange(transport, script, stream(b"b")) == ([(b"a", True), (b"b", True)], 2)


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_has_no_body(transport: HttpxTransport, status: int) -> None:
    """It is over with its header, though that may say chunked."""

    async def script(_: Request, connection: Connection) -> None:
        await connection.send(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % status)

    with anyio.fail_after(5):
        assert await exchange(transport, script, stream(b"b")) == ([(b"", False), (b"b", True)], 1)


async def test_nothing_is_read_after_a_close(transport: HttpxTransport) -> None:
    """Who reads on after somebody else has closed the stream is told so, also where bytes had come already."""

    async def script(_: Request, connection: Connection) -> None:
        await connection.send(CHUNKED + b"1\r\na\r\n1\r\nb\r\n")
        await connection.gone()

    for turns in range(8):
        async with ScriptedServer({"/x": script}) as server:
            response = await transport.open("GET", server.url + "/x", None, {})
            begun = anyio.Event()

            async def close(response: Response = response, begun: anyio.Event = begun) -> None:
                begun.set()
                await response.close()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(close)
                await begun.wait()
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                with pytest.raises(StreamCut, match="closed from this side"):
                    await response.read()


class Spoilt(httpcore.AsyncMockStream):
    """A TLS connection that breaks with a record that cannot be read."""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """The header, and then the error."""
        return await super().read(max_bytes, timeout) or self._fail()

    def _fail(self) -> bytes:
        raise ssl.SSLError(1, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC]")


async def test_a_broken_tls_record_cuts_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a connection that broke, and no fault of the request."""
    parts = httpcore.AsyncMockBackend([])
    monkeypatch.setattr(parts, "connect_tcp", lambda *_, **__: _now(Spoilt([CHUNKED])))
    transport = HttpxTransport()
    transport._pools[False].append(OwnPool(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), 1.0, TapBackend(parts)))
    response = await transport.open("GET", "http://127.0.0.1:1/x", None, {})
    with pytest.raises(StreamCut, match="BAD_RECORD_MAC"):
        await response.read()
    await response.close()
    await transport.aclose()


async def _now(value: httpcore.AsyncNetworkStream) -> httpcore.AsyncNetworkStream:
    return value
