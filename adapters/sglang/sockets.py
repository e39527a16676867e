"""Sockets for httpcore that let a body be read past its parser.

httpcore hands its network stream out with every response. A `Tap` gives the parser the header and keeps what comes
behind it, so that a chunked body can be taken from here as it arrives; at its end the parser is given an empty body,
and the connection can be used again. Where nobody takes the body, it passes through the parser as ever.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable
from typing import Any, Final

import httpcore

READ_BYTES: Final = 256 * 1024
EMPTY_BODY: Final = b"0\r\n\r\n"
"""What ends a chunked body: all of it that the parser gets to see."""
_HEAD_END: Final = re.compile(rb"\n\r?\n")  # where the parser sees it, too


class Tap(httpcore.AsyncNetworkStream):
    """A network stream whose reader can change in the middle: the parser up to the body, then whoever takes it."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._kept = b""  # read from the socket, and given to nobody
        self._head: bytes | None = b""  # the last bytes of an unfinished header; None behind its end
        self._passed = False  # whether the parser has been given anything behind the header
        self._ending = False  # whether the parser is to see the end of a body that was taken

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """For the parser: nothing behind the end of a header comes together with it."""
        if self._ending:
            self._ending = False
            return EMPTY_BODY
        data = self._kept or await self._stream.read(max_bytes, timeout)
        self._kept = b""
        if self._head is None:
            self._passed = True
            return data
        end = _HEAD_END.search(self._head + data)
        if end is None:
            self._head = (self._head + data)[-2:]
            return data
        size = end.end() - len(self._head)
        self._head, self._kept = None, data[size:]
        return data[:size]

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """A request: a header is to come."""
        self._head, self._passed = b"", False
        await self._stream.write(buffer, timeout)

    @property
    def whole(self) -> bool:
        """Whether the body can be taken: the parser has seen the header of this response and nothing behind it.

        Behind an interim header (1xx) the parser has read on.
        """
        return self._head is None and not self._passed

    async def take(self) -> bytes:
        """The body as it comes, b"" where the connection ends. Raises httpcore's errors."""
        data, self._kept = self._kept, b""
        return data or await self._stream.read(READ_BYTES)

    def finish(self, rest: bytes) -> None:
        """The body has been taken to its end: the parser gets an empty one, and never what came behind it."""
        self._kept, self._ending = rest, True

    async def aclose(self) -> None:
        """Close the socket."""
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        """The same over TLS."""
        return Tap(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        """What httpcore asks of its sockets. Bytes that nobody asked for make an idle connection readable."""
        if info == "is_readable" and self._kept:
            return True
        return self._stream.get_extra_info(info)


class TapBackend(httpcore.AsyncNetworkBackend):
    """Connects as httpcore does by itself, on asyncio and trio."""

    def __init__(self, backend: httpcore.AsyncNetworkBackend | None = None) -> None:
        self._backend = backend or httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """A connection."""
        return Tap(await self._backend.connect_tcp(host, port, timeout, local_address, socket_options))
