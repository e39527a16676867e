"""Where the plain transport gets its answers from: a client of the caller's, or connections of its own."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import httpcore
import httpx

from adapters.sglang.chunked import ChunkedBody, NotChunked
from adapters.sglang.sockets import Tap, TapBackend

KEEPALIVE_S = 4.0
"""Idle connections are dropped before the server's own 5 s (uvicorn under SGLang): no POST meets a closing socket."""
NO_BODY = frozenset({204, 304})
"""Whatever their header says (RFC 9112, section 6.3). HEAD is never asked."""
CUT = "peer closed connection without sending complete message body (incomplete chunked read)"


@dataclass(slots=True)
class Answered:
    """An answer whose body has not been read: its bytes as they come, and how to give them up."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]
    aclose: Callable[[], Awaitable[None]]


class Pool(Protocol):
    """Some connections and how many streams are open on them."""

    streams: int

    async def send(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Answered:
        """Send a request, return its answer. Raises errors of httpx or httpcore."""
        ...

    async def aclose(self) -> None:
        """Close what is ours."""
        ...


class ClientPool:
    """A client of the caller's, used as it is and never closed."""

    def __init__(self, client: httpx.AsyncClient, connect_timeout: float) -> None:
        self.streams = 0
        self._client = client
        self._timeout = httpx.Timeout(None, connect=connect_timeout)

    async def send(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Answered:
        """Send a request by the client."""
        request = self._client.build_request(
            method, url, content=body, headers=headers, timeout=self._timeout
        )
        response = await self._client.send(request, stream=True, follow_redirects=False)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        return Answered(response.status_code, response.headers, aiter(response.stream), response.aclose)

    async def aclose(self) -> None:
        """Nothing here is ours."""


class OwnPool:
    """Connections of httpcore, without an httpx client: its cookies, redirects and hooks are not wanted.

    A chunked body is read past httpcore's parser, which makes an event of every chunk (see `sockets`).
    """

    def __init__(
        self, context: ssl.SSLContext, connect_timeout: float, sockets: TapBackend | None = None
    ) -> None:
        self.streams = 0
        self._timeout = {"connect": connect_timeout}
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=context,
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=KEEPALIVE_S,
            network_backend=sockets or TapBackend(),
        )

    async def send(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Answered:
        """Send a request."""
        asked = httpx.Request(method, url, content=body, headers=headers)
        place = asked.url
        target = httpcore.URL(
            scheme=place.raw_scheme, host=place.raw_host, port=place.port, target=place.raw_path
        )
        request = httpcore.Request(
            method, target, headers=asked.headers.raw, content=body, extensions={"timeout": self._timeout}
        )
        response = await self._pool.handle_async_request(request)
        headers = httpx.Headers(response.headers)
        tap = response.extensions["network_stream"]
        if tap.whole and response.status not in NO_BODY and _is_chunked(headers):
            return Answered(response.status, headers, _TakenBody(tap, response), response.aclose)
        return Answered(response.status, headers, aiter(response.aiter_stream()), response.aclose)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._pool.aclose()


def _is_chunked(headers: Mapping[str, str]) -> bool:
    return headers.get("transfer-encoding", "").strip().lower() == "chunked"


class _TakenBody:
    """A chunked body taken from its socket; httpcore sees none of it, and its end."""

    def __init__(self, tap: Tap, response: httpcore.Response) -> None:
        self._tap = tap
        self._response = response
        self._body = ChunkedBody()
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._ended:
            data = await self._tap.take()
            if not data:
                raise httpcore.RemoteProtocolError(CUT)
            try:
                found = self._body.feed(data)
            except NotChunked as problem:
                raise httpcore.RemoteProtocolError(str(problem)) from None
            if self._body.complete:
                await self._finish()
            if found:
                return found
        raise StopAsyncIteration

    async def _finish(self) -> None:
        """Show the end of the body to httpcore, which then keeps the connection for the next request."""
        self._ended = True
        self._tap.finish(self._body.rest)
        async for _ in self._response.aiter_stream():
            pass
