"""Requests over aiohttp: the extra `fast`, for asyncio. Half the cost per token of the plain transport.

A stream whose reader is slow is slowed by TCP: aiohttp stops reading its socket at twice `READ_BUFFER` bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
from yarl import URL

from adapters.sglang.transport import HEADERS, KEEPALIVE_S, ConnectFailed, Response, StreamCut, describe

READ_BUFFER = 128 * 1024
"""Bytes; asyncio reads up to 256 KiB at once."""

NOT_CONNECTED = (
    aiohttp.ClientConnectorError,
    aiohttp.ServerTimeoutError,
    aiohttp.InvalidURL,
    UnicodeError,  # a host name that cannot be looked up
)
BROKEN = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


class AiohttpResponse:
    """An aiohttp answer."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._content = response.content

    async def read(self) -> bytes:
        """Everything that has arrived since the last read, b"" at the end."""
        try:
            return await self._content.readany()
        except BROKEN as problem:
            rest = self._arrived()
            if rest:
                return rest
            raise StreamCut(describe(problem)) from None

    def _arrived(self) -> bytes:
        """What arrived before the connection broke: aiohttp raises first and would keep it."""
        take = getattr(self._content, "_read_nowait", None)  # read_nowait raises as well
        return bytes(take(-1)) if take is not None else b""

    async def close(self) -> None:
        """Give the connection back at the end of the body, else close it at once."""
        if self._content.at_eof():
            self._response.release()
        else:
            self._response.close()


class AiohttpTransport:
    """Requests over aiohttp. The session is made at the first request, inside the loop that uses it."""

    name = "aiohttp"

    def __init__(self, *, connect_timeout: float = 10.0) -> None:
        self._connect_timeout = connect_timeout
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}

    async def open(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> Response:
        """Send and wait for the header."""
        session = self._session or self._start()
        target = self._urls.get(url) or self._urls.setdefault(url, URL(url, encoded=True))
        try:
            return AiohttpResponse(
                await session.request(method, target, data=body, headers=headers, allow_redirects=False)
            )
        except NOT_CONNECTED as problem:
            raise ConnectFailed(describe(getattr(problem, "os_error", problem))) from None
        except BROKEN as problem:
            raise StreamCut(describe(problem)) from None

    def _start(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            headers=HEADERS,
            auto_decompress=False,
            read_bufsize=READ_BUFFER,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self._session

    async def aclose(self) -> None:
        """Close every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
