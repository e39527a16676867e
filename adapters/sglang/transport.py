"""How bytes get to a server and back: one small interface, and the plain httpx implementation of it.

Streams have no read time-out (a paused or queued request is silent for as long as that lasts) and connections
enough for everything in flight; `adapters.sglang.transport_fast` is the faster implementation, for asyncio.
"""

from __future__ import annotations

import contextlib
import errno
import ssl
from collections.abc import Mapping
from typing import Protocol

import anyio
import httpcore
import httpx

from adapters.sglang.pools import Answered, ClientPool, OwnPool, Pool
from lifecycle.errors import ConfigurationError

HEADERS = {
    "content-type": "application/json",
    "accept": "text/event-stream, application/json",
    "accept-encoding": "identity",  # every compressor on the way would hold tokens back
}
STREAMS_PER_POOL = 16
"""httpcore's pool does work that grows with the square of its open connections; several small pools do not."""
DEFAULT_IN_FLIGHT = 512
"""What a client brought by the caller must be able to hold open where nothing else was said: the engine's default."""
CLOSE_TIMEOUT_S = 2.0
CLOSED = "the connection was closed from this side"


class ConnectFailed(Exception):
    """No connection could be made; the request was not sent."""


class StreamCut(Exception):
    """The connection broke, or spoke no HTTP, after the request was sent."""


class Response(Protocol):
    """One answer, its body not read yet."""

    status: int
    headers: Mapping[str, str]  # to be asked in lower case

    async def read(self) -> bytes:
        """What the last socket read brought, b"" at the end of the body.

        Raises StreamCut when the connection breaks, or when `close` is called meanwhile.
        """
        ...

    async def close(self) -> None:
        """Give the connection back if the body was read to its end, else close it. May be called twice."""
        ...


class Transport(Protocol):
    """Opens requests."""

    name: str

    async def open(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Response:
        """Send; return when the header of the answer is there. Raises ConnectFailed or StreamCut."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


def describe(problem: BaseException) -> str:
    """An exception of an HTTP client in a few words; no header is ever part of it."""
    if any(getattr(cause, "errno", None) == errno.EMFILE for cause in _chain(problem)):
        return "too many open files in this process: raise the limit (ulimit -n) or lower max_in_flight"
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__


def _chain(problem: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while problem is not None and problem not in chain:
        chain.append(problem)
        problem = problem.__cause__ or problem.__context__
    return chain


NOT_CONNECTED = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpcore.ConnectError,
    httpcore.ConnectTimeout,
    UnicodeError,  # a host name that cannot be looked up
)
BROKEN = (
    httpx.TransportError,
    httpx.StreamError,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    ssl.SSLError,  # in mid-stream; httpcore maps those of the handshake
)


class HttpxResponse:
    """An answer; it counts for its pool until it is closed."""

    def __init__(self, answer: Answered, pool: Pool) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self._chunks = answer.chunks
        self._aclose = answer.aclose
        self._pool: Pool | None = pool
        self._reading = False
        self._over = False  # the body has ended, one way or another

    async def read(self) -> bytes:
        """The bytes of one read, b"" at the end."""
        if self._pool is None:
            raise StreamCut(CLOSED)
        return await self._read()

    async def _read(self) -> bytes:
        self._reading = True
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            self._over = True
            return b""
        except BROKEN as problem:
            self._over = True
            raise StreamCut(describe(problem)) from None
        except BaseException:
            self._over = True
            raise
        finally:
            self._reading = False

    async def close(self) -> None:
        """Close at once; bounded, and shielded from a cancellation that is already under way.

        The generators inside httpx and httpcore are left suspended when a body is given up half-way, and trio
        complains of each. Reading on after the connection is closed ends them with the error that this brings.
        """
        pool, self._pool = self._pool, None
        if pool is None:
            return
        pool.streams -= 1
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True), contextlib.suppress(*BROKEN):
            await self._aclose()
        while not self._over and not self._reading:
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True), contextlib.suppress(StreamCut):
                await self._read()


class HttpxTransport:
    """Requests over httpx's connections, on asyncio and trio.

    A `client` of the caller's is used as it is and never closed here; see `check_client`.
    """

    name = "httpx"

    def __init__(self, *, connect_timeout: float = 10.0, client: httpx.AsyncClient | None = None) -> None:
        self._connect_timeout = connect_timeout
        self._given = None if client is None else ClientPool(client, connect_timeout)
        self._pools: dict[bool, list[Pool]] = {False: [], True: []}  # by whether they speak TLS
        self._contexts: dict[bool, ssl.SSLContext] = {}

    async def open(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Response:
        """Send and wait for the header."""
        pool = self._given or self._roomy_pool(url.startswith("https:"))
        pool.streams += 1
        try:
            return HttpxResponse(await pool.send(method, url, body, {**HEADERS, **headers}), pool)
        except BaseException as problem:
            pool.streams -= 1
            if isinstance(problem, NOT_CONNECTED):
                raise ConnectFailed(describe(problem)) from None
            if isinstance(problem, BROKEN):
                raise StreamCut(describe(problem)) from None
            raise

    def _roomy_pool(self, tls: bool) -> Pool:
        for pool in self._pools[tls]:
            if pool.streams < STREAMS_PER_POOL:
                return pool
        pool = OwnPool(self._context(tls), self._connect_timeout)
        self._pools[tls].append(pool)
        return pool

    def _context(self, tls: bool) -> ssl.SSLContext:
        """One for all pools: reading the certificates takes tens of ms. Plain HTTP gets one that trusts nobody."""
        if tls not in self._contexts:
            self._contexts[tls] = (
                httpx.create_ssl_context() if tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            )
        return self._contexts[tls]

    async def aclose(self) -> None:
        """Close the pools made here; a client of the caller's stays open."""
        for pool in (*self._pools[False], *self._pools[True]):
            await pool.aclose()


def check_client(client: httpx.AsyncClient, needed: int) -> None:
    """Refuse a caller's client that cannot hold `needed` streams open at once. Raises ConfigurationError."""
    if not isinstance(client, httpx.AsyncClient):
        raise ConfigurationError(f"client must be an httpx.AsyncClient, not {type(client).__name__}")
    pool = getattr(getattr(client, "_transport", None), "_pool", None)  # httpx has no public way to ask
    limit = getattr(pool, "_max_connections", None)
    if isinstance(limit, int) and limit < needed:
        raise ConfigurationError(
            f"client allows {limit} connections, but {needed} streams may be in flight: the rest would wait in its "
            "pool unseen. Give httpx.AsyncClient(limits=httpx.Limits(max_connections=None)), or set max_connections"
        )
