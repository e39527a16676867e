"""An HTTP server over raw TCP that does exactly what a script says: wrong statuses, cut bodies, silence.

    async with ScriptedServer({"/generate": stream(event(a), CUT)}) as server:
        server.url, server.requests

With `tls` it speaks https, with a certificate for 127.0.0.1 that whoever trusts `CERTIFICATE` trusts.
A path without a script answers 404 with an empty body, as sglang-router 0.3.2 does. Runs on asyncio and trio.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
import msgspec
from anyio.streams.tls import TLSListener

CERTIFICATE = Path(__file__).parents[1] / "data" / "tls.pem"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True)
class Request:
    """One request as it arrived; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return msgspec.json.decode(self.body)


class Connection:
    """One client's connection, for scripts that speak HTTP by hand."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream
        self._buffer = b""

    async def send(self, data: bytes) -> None:
        """Write bytes as they are."""
        await self._stream.send(data)

    async def chunk(self, data: bytes) -> None:
        """Write one piece of a chunked body."""
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def end(self) -> None:
        """End a chunked body."""
        await self.send(b"0\r\n\r\n")

    async def gone(self) -> None:
        """Wait until the client has closed its side."""
        try:
            while await self._stream.receive():
                pass
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return

    async def cut(self) -> None:
        """Close the connection here and now; nothing more of this script runs."""
        await self._stream.aclose()
        raise Cut

    async def request(self) -> Request | None:
        """The next request, None when the client has closed."""
        while b"\r\n\r\n" not in self._buffer:
            try:
                self._buffer += await self._stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return None
        head, _, rest = self._buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
        while len(rest) < length:
            rest += await self._stream.receive()
        self._buffer = rest[length:]
        return Request(method, path, headers, rest[:length])


class Cut(Exception):
    """The script closed the connection."""


Script = Callable[[Request, Connection], Awaitable[None]]


def answer(status: int, body: Any = b"", content_type: str | None = None, **headers: str) -> Script:
    """A plain answer; a body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    kind = content_type or ("text/plain" if isinstance(body, bytes) else "application/json")
    lines = [f"HTTP/1.1 {status} Scripted", f"content-type: {kind}", f"content-length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    whole = "\r\n".join(lines).encode() + b"\r\n\r\n" + data

    async def script(_: Request, connection: Connection) -> None:
        await connection.send(whole)

    return script


def stream(*pieces: bytes, cut: bool = False) -> Script:
    """An event stream, one write per piece; with `cut` the connection breaks after them."""

    async def script(_: Request, connection: Connection) -> None:
        await connection.send(STREAM_HEAD)
        for piece in pieces:
            await connection.chunk(piece)
        if cut:
            await connection.cut()
        await connection.end()

    return script


async def mute(_: Request, connection: Connection) -> None:
    """The header of an event stream, and nothing behind it."""
    await connection.send(STREAM_HEAD)
    await connection.gone()


async def silence(_: Request, connection: Connection) -> None:
    """No answer at all, until the client goes away."""
    await connection.gone()


def raw(data: bytes) -> Script:
    """Bytes that may not even be HTTP; then the connection is closed."""

    async def script(_: Request, connection: Connection) -> None:
        await connection.send(data)
        await connection.cut()

    return script


def in_turn(*scripts: Script) -> Script:
    """One script per request; the last one for all that follow."""
    left = list(scripts)

    async def script(request: Request, connection: Connection) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(request, connection)

    return script


@dataclass
class ScriptedServer:
    """The server. `scripts` maps paths (without query) to what is done; it may be changed while running."""

    scripts: dict[str, Script] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    tls: bool = False
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _stopped: anyio.Event = field(default_factory=anyio.Event)

    @property
    def url(self) -> str:
        """Base URL."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        """The paths that were asked for, in order."""
        return [request.path for request in self.requests]

    def asked(self, path: str) -> list[Request]:
        """The requests for one path."""
        return [request for request in self.requests if request.path.partition("?")[0] == path]

    async def __aenter__(self) -> Self:
        """Listen on a free port."""
        listener: Any = await anyio.create_tcp_listener(local_host="127.0.0.1")
        self.port = listener.extra(anyio.abc.SocketAttribute.local_port)
        if self.tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            listener = TLSListener(listener, context, standard_compatible=False)
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.push_async_callback(self.stop)
        tasks.start_soon(self._listen, listener)
        return self

    async def stop(self) -> None:
        """Die: every connection breaks, and new ones are refused."""
        self._scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._stopped.wait()

    async def _listen(self, listener: Any) -> None:
        try:
            with self._scope:
                await listener.serve(self._serve)
        finally:
            with anyio.CancelScope(shield=True):
                await listener.aclose()
            self._stopped.set()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _serve(self, client: anyio.abc.ByteStream) -> None:
        self.connections += 1
        async with client:
            connection = Connection(client)
            try:
                while (request := await connection.request()) is not None:
                    self.requests.append(request)
                    script = self.scripts.get(request.path.partition("?")[0], answer(404))
                    await script(request, connection)
            except (Cut, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return
