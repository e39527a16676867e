"""Requests over asyncio's own sockets and httptools' parser (llhttp, the one under uvicorn): the extra `fast`.

A general HTTP client does work for every chunk of a chunked body, and a token is a chunk. Here a socket read goes
into one buffer that all connections share, is parsed, and wakes the reader of the stream: once a read, however many
chunks it brought. A stream whose reader is slow is slowed by TCP: its socket is not read above `HIGH_WATER` bytes.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools
import httpx

from adapters.sglang.pools import KEEPALIVE_S, NO_BODY
from adapters.sglang.transport import CLOSED, HEADERS, ConnectFailed, Response, StreamCut, describe

READ_BUFFER = 256 * 1024
"""Bytes of one read at most; one buffer serves all connections, because what a read brought is parsed at once."""
HIGH_WATER = 64 * 1024
HEADER_LIMIT = 256 * 1024

Origin = tuple[bool, str, int]
"""Whether it speaks TLS, its host and its port."""


class Connection(asyncio.BufferedProtocol):
    """One connection: requests one after the other, the answer to the present one in pieces.

    The methods that begin with `on_` are called by the parser.
    """

    def __init__(self, buffer: memoryview, origin: Origin) -> None:
        self.origin = origin
        self.status = 0
        self.headers: dict[str, str] = {}
        self.headers_complete = False
        self.complete = False  # the answer has been received to its end
        self.broken: str | None = None  # why nothing more will come
        self.idle_since: float | None = None  # set while it waits in the pool
        self.transport: asyncio.Transport | None = None
        self._buffer = buffer
        self._parser: Any = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._held = 0  # bytes in them
        self._head = 0  # bytes of the header so far
        self._paused = False
        self._kept = False  # whether the server goes on with the connection after this answer
        self._waiter: asyncio.Future[None] | None = None

    # -- asyncio -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self.transport = transport  # type: ignore[assignment]  # a stream transport, by contract

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where the next read goes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse one read and wake who waits for it."""
        if self.idle_since is not None:
            self.shut("bytes that nobody asked for")
            return
        if not self.headers_complete:
            self._head += nbytes
            if self._head > HEADER_LIMIT:
                self.shut(f"a header of more than {HEADER_LIMIT} bytes")
                return
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as problem:
            self.shut(describe(problem))
            return
        if self._held > HIGH_WATER and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """Nothing more comes; asyncio closes the transport."""
        return False

    def connection_lost(self, problem: Exception | None) -> None:
        """The connection is over. A body without length or chunks ends with it, any other is cut."""
        if self.headers_complete and self._until_close:
            self.complete = True
        self._break(describe(problem) if problem is not None else "the server closed the connection")
        self.transport = None

    # -- the parser --------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field."""
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        """The header is there, unless it was an interim one (1xx)."""
        status = self._parser.get_status_code()
        if status < 200:  # noqa: PLR2004
            self.headers.clear()
            return
        self.status = status
        self.headers_complete = True

    def on_body(self, data: bytes) -> None:
        """A piece of the body: a chunk, or as much of it as this read brought."""
        self._parts.append(data)
        self._held += len(data)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self.headers_complete:
            self.complete = True
            self._kept = self._parser.should_keep_alive()

    # -- requests ----------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self.broken is None and self.transport is not None and not self.transport.is_closing()

    @property
    def reusable(self) -> bool:
        """Whether the answer was read to its end and the server keeps the connection."""
        return self.complete and self.usable and not self._parts and self._kept

    @property
    def _until_close(self) -> bool:
        framed = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "")
        return not framed and self.status not in NO_BODY

    async def request(self, data: bytes) -> None:
        """Send a request; returns when the header of its answer is there. Raises StreamCut."""
        self.idle_since = None
        self.status, self.headers, self._head = 0, {}, 0
        self.headers_complete = self.complete = False
        if self.transport is not None:
            self.transport.write(data)
        while not self.headers_complete:
            if self.broken is not None:
                raise StreamCut(self.broken)
            await self._wait()

    async def read(self) -> bytes:
        """What came since the last read, b"" at the end. Raises StreamCut."""
        while not self._parts:
            if self.complete:
                return b""
            if self.broken is not None:
                raise StreamCut(self.broken)
            await self._wait()
        return self.take()

    def take(self) -> bytes:
        """What came since the last read, if anything."""
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._held = 0
        if self._paused:
            self._paused = False
            if self.transport is not None:
                self.transport.resume_reading()
        return data

    def shut(self, why: str) -> None:
        """Close at once; who waits is told why."""
        self._break(why)
        if self.transport is not None:
            self.transport.abort()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _break(self, why: str) -> None:
        if self.broken is None:
            self.broken = why
        self._wake()


class FastResponse:
    """The present answer of a connection, which goes back to the pool afterwards."""

    def __init__(self, connection: Connection, pool: FastTransport) -> None:
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers
        self._connection: Connection | None = connection
        self._pool = pool

    async def read(self) -> bytes:
        """Everything that has arrived since the last read, b"" at the end."""
        connection = self._connection
        if connection is None:
            raise StreamCut(CLOSED)
        return await connection.read()

    async def close(self) -> None:
        """Give the connection back at the end of the body, else close it at once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(connection)


class FastTransport:
    """Requests on the event loop that runs when the first one is made."""

    name = "fast"

    def __init__(self, *, connect_timeout: float = 10.0) -> None:
        self._connect_timeout = connect_timeout
        self._buffer = memoryview(bytearray(READ_BUFFER))
        self._targets: dict[str, tuple[Origin, bytes]] = {}
        self._idle: dict[Origin, list[Connection]] = {}
        self._all: set[Connection] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._context: ssl.SSLContext | None = None

    async def open(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Response:
        """Send and wait for the header."""
        target = self._targets.get(url)
        if target is None:
            target = self._targets[url] = _target(url)
        origin, line = target
        head = [b"%s %s" % (method.encode(), line)]
        head += [f"{name}: {value}".encode("latin-1") for name, value in (HEADERS | dict(headers)).items()]
        head.append(b"content-length: %d\r\n\r\n" % len(body or b""))
        if any(b"\r" in line or b"\n" in line for line in head[1:-1]):
            raise StreamCut("a header value with a line break in it: the request was not sent")
        connection = self._take(origin) or await self._connect(origin)
        try:
            await connection.request(b"\r\n".join(head) + (body or b""))
        except BaseException:
            self._drop(connection, CLOSED)
            raise
        return FastResponse(connection, self)

    async def aclose(self) -> None:
        """Close every connection."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        self._idle.clear()
        while self._all:
            self._all.pop().shut(CLOSED)
        await asyncio.sleep(0)  # asyncio closes the sockets in its next turn

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose answer was read to its end, close any other."""
        if not connection.reusable or connection not in self._all:
            self._drop(connection, CLOSED)
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.setdefault(connection.origin, []).append(connection)
        if self._sweeping is None:
            self._sweeping = loop.call_later(KEEPALIVE_S, self._sweep)

    def _take(self, origin: Origin) -> Connection | None:
        """The connection to `origin` that became idle last, if it can still be trusted."""
        idle = self._idle.get(origin, [])
        oldest = asyncio.get_running_loop().time() - KEEPALIVE_S
        while idle:
            connection = idle.pop()
            if connection.usable and (connection.idle_since or 0.0) > oldest:
                return connection
            self._drop(connection, CLOSED)
        return None

    async def _connect(self, origin: Origin) -> Connection:
        tls, host, port = origin
        loop = asyncio.get_running_loop()
        if tls and self._context is None:
            self._context = httpx.create_ssl_context()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._buffer, origin), host, port, ssl=self._context if tls else None
                )
        except TimeoutError:
            raise ConnectFailed(f"no connection within {self._connect_timeout:g} s") from None
        except (OSError, UnicodeError) as problem:  # a host name that is none is a UnicodeError
            raise ConnectFailed(describe(problem)) from None
        self._all.add(connection)
        return connection

    def _drop(self, connection: Connection, why: str) -> None:
        self._all.discard(connection)
        connection.shut(why)

    def _sweep(self) -> None:
        """Close what has been idle for too long; again later while anything is idle."""
        now = asyncio.get_running_loop().time()
        oldest = now - KEEPALIVE_S
        self._sweeping = None
        for origin, connections in list(self._idle.items()):
            kept = [each for each in connections if each.usable and (each.idle_since or 0.0) > oldest]
            for connection in set(connections).difference(kept):
                self._drop(connection, CLOSED)
            if kept:
                self._idle[origin] = kept
            else:
                del self._idle[origin]
        if self._idle:
            first = min(each.idle_since or now for kept in self._idle.values() for each in kept)
            loop = asyncio.get_running_loop()
            self._sweeping = loop.call_at(first + KEEPALIVE_S + 0.01, self._sweep)


def _target(url: str) -> tuple[Origin, bytes]:
    """Where a URL is, and the first line and the host header of requests to it, without the method."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    origin = (tls, parts.hostname or "", port)
    return origin, f"{path} HTTP/1.1\r\nhost: {parts.netloc}".encode("latin-1")
