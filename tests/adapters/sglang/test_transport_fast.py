"""The fast transport by itself: what the tests of the backend, which run over every transport, do not reach."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator

import anyio
import pytest

from adapters.sglang import transport_fast
from adapters.sglang.transport import ConnectFailed, StreamCut
from adapters.sglang.transport_fast import FastTransport
from tests.support.scripted_server import (
    Connection,
    Request,
    Script,
    ScriptedServer,
    answer,
    in_turn,
    mute,
    raw,
)

pytestmark = pytest.mark.anyio
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    """It runs on asyncio only."""
    return "asyncio"


@pytest.fixture
async def transport() -> AsyncIterator[FastTransport]:
    """One transport."""
    transport = FastTransport(connect_timeout=5.0)
    yield transport
    await transport.aclose()
    gc.collect()  # a socket left open would be a ResourceWarning, and that an error


async def get(transport: FastTransport, url: str) -> bytes:
    """One whole answer."""
    response = await transport.open("GET", url, None, {})
    try:
        body = b""
        while data := await response.read():
            body += data
        return body
    finally:
        await response.close()


async def exchange(transport: FastTransport, *scripts: Script, path: str = "/x") -> tuple[list[bytes], int]:
    """The bodies of some answers, one after the other, and how many connections they took."""
    async with ScriptedServer({path: in_turn(*scripts)}) as server:
        bodies = [await get(transport, server.url + path) for _ in scripts]
        return bodies, server.connections


async def test_connections_are_used_again(transport: FastTransport) -> None:
    """Whole answers leave a connection that serves the next request."""
    assert await exchange(transport, answer(200, b"a"), answer(404, b"b"), answer(200)) == (
        [b"a", b"b", b""],
        1,
    )


async def test_server_that_closes(transport: FastTransport) -> None:
    """`connection: close` is heeded."""
    closing = answer(200, b"a", connection="close")
    assert await exchange(transport, closing, answer(200, b"b")) == ([b"a", b"b"], 2)


async def test_body_until_the_end(transport: FastTransport) -> None:
    """A body without length ends with its connection."""
    until = raw(b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nall of it")
    assert (await exchange(transport, until))[0] == [b"all of it"]


async def test_interim_answer(transport: FastTransport) -> None:
    """An interim answer comes before the answer, and its header is not the answer's."""
    both = b"HTTP/1.1 103 Early\r\nx-early: 1\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    async with ScriptedServer({"/x": raw(both)}) as server:
        response = await transport.open("GET", server.url + "/x", None, {})
        assert (response.status, dict(response.headers)) == (200, {"content-length": "2"})
        assert await response.read() == b"ok"
        await response.close()


async def test_repeated_header(transport: FastTransport) -> None:
    """A header that comes twice is one with both values."""
    twice = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a: 2\r\ncontent-length: 0\r\n\r\n"
    async with ScriptedServer({"/x": raw(twice)}) as server:
        response = await transport.open("GET", server.url + "/x", None, {})
        assert response.headers["x-a"] == "1, 2"
        await response.close()
        await response.close()


async def test_idle_connections_are_dropped(
    transport: FastTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that nobody uses is closed by itself, before the server would."""
    monkeypatch.setattr(transport_fast, "KEEPALIVE_S", 0.05)
    gone = anyio.Event()

    async def script(request: Request, connection: Connection) -> None:
        await answer(200, b"a")(request, connection)
        await connection.gone()
        gone.set()

    async with ScriptedServer({"/x": script}) as server:
        assert await get(transport, server.url + "/x") == b"a"
        with anyio.fail_after(5):
            await gone.wait()


async def test_connection_that_was_idle_too_long_is_not_used(
    transport: FastTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request never meets a connection that the server may be about to close."""
    async with ScriptedServer({"/x": answer(200, b"a")}) as server:
        await get(transport, server.url + "/x")
        monkeypatch.setattr(transport_fast, "KEEPALIVE_S", 0.0)
        await get(transport, server.url + "/x")
        assert server.connections == 2


async def test_server_that_talks_unasked(transport: FastTransport) -> None:
    """Bytes on an idle connection are nobody's answer: the connection is closed."""
    talked = anyio.Event()

    async def script(request: Request, connection: Connection) -> None:
        await answer(200, b"a")(request, connection)
        await here.wait()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad")
        await connection.gone()
        talked.set()

    here = anyio.Event()
    async with ScriptedServer({"/x": in_turn(script, answer(200, b"b"))}) as server:
        assert await get(transport, server.url + "/x") == b"a"
        here.set()
        with anyio.fail_after(5):
            await talked.wait()
        assert await get(transport, server.url + "/x") == b"b"


async def test_endless_header(transport: FastTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header without end is cut off at the limit."""
    monkeypatch.setattr(transport_fast, "HEADER_LIMIT", 1_000)
    async with ScriptedServer({"/x": raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 5_000)}) as server:
        with pytest.raises(StreamCut, match="a header of more than 1000 bytes"):
            await transport.open("GET", server.url + "/x", None, {})


@pytest.mark.parametrize(
    "bytes_",
    [
        b"no HTTP\r\n\r\n",
        CHUNKED + b"zz\r\nabc\r\n",
        CHUNKED + b"-1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 101 Switching\r\nupgrade: other\r\nconnection: upgrade\r\n\r\n",
    ],
    ids=["no HTTP", "no size", "negative size", "two lengths", "upgrade"],
)
async def test_no_http(transport: FastTransport, bytes_: bytes) -> None:
    """What is not HTTP, or not what was asked for, breaks the connection."""
    async with ScriptedServer({"/x": raw(bytes_)}) as server:
        with pytest.raises(StreamCut):
            await get(transport, server.url + "/x")


async def test_close_wakes_a_reader(transport: FastTransport) -> None:
    """Closing a response ends a read that waits."""
    async with ScriptedServer({"/x": mute}) as server:
        response = await transport.open("GET", server.url + "/x", None, {})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(response.close)
            with anyio.fail_after(5), pytest.raises(StreamCut, match="closed from this side"):
                await response.read()
        with pytest.raises(StreamCut, match="closed from this side"):
            await response.read()


async def test_line_break_in_a_header(transport: FastTransport) -> None:
    """A header cannot smuggle in another."""
    async with ScriptedServer() as server:
        with pytest.raises(StreamCut, match="line break"):
            await transport.open("GET", server.url, None, {"x": "1\r\ny: 2"})
        assert server.connections == 0


async def test_connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that does not come about in time is one that failed."""

    async def never(*_: object, **__: object) -> None:
        await anyio.sleep_forever()

    transport = FastTransport(connect_timeout=0.05)
    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.create_connection", never)
    with pytest.raises(ConnectFailed, match=r"no connection within 0\.05 s"):
        await transport.open("GET", "http://127.0.0.1:1/x", None, {})


@pytest.mark.parametrize(
    ("url", "origin", "line"),
    [
        ("http://h:1/generate", (False, "h", 1), b"/generate HTTP/1.1\r\nhost: h:1"),
        ("https://h", (True, "h", 443), b"/ HTTP/1.1\r\nhost: h"),
        ("http://[::1]:8/a?b=c", (False, "::1", 8), b"/a?b=c HTTP/1.1\r\nhost: [::1]:8"),
    ],
)
def test_target(url: str, origin: tuple[bool, str, int], line: bytes) -> None:
    """Where a URL is, and what the first lines of a request to it say."""
    assert transport_fast._target(url) == (origin, line)
