"""`SGLangBackend`: one SGLang server, several, or a router with servers behind it, as a backend of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

import anyio
import httpx
import msgspec

from adapters.sglang.answers import Answer, end, http_answer
from adapters.sglang.attempt import AttemptDecoder
from adapters.sglang.live import LiveStream, LiveStreams
from adapters.sglang.outgoing import Targets, base_urls, read_secret, request_body, request_headers
from adapters.sglang.sse import DEFAULT_EVENT_LIMIT
from adapters.sglang.transport import ConnectFailed, HttpxTransport, Response, StreamCut, Transport
from lifecycle.backend import Call
from lifecycle.errors import ConfigurationError
from lifecycle.events import StreamEnd, StreamEvent

OK = 200
ERROR_BODY_BYTES = 8192
ERROR_BODY_S = 5.0
DRAIN_S = 0.25


class SGLangBackend:
    """Streams from SGLang. An async context manager."""

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        api_key: str | None = None,
        api_key_env: str | None = None,
        max_connections: int | None = None,
        text: bool = False,
        client: httpx.AsyncClient | None = None,
        connect_timeout: float = 10.0,
        event_limit: int = DEFAULT_EVENT_LIMIT,
    ) -> None:
        self.urls = base_urls(url)
        self.max_connections = max_connections
        self._secret = read_secret(api_key, api_key_env)
        self._text = text
        self._event_limit = event_limit
        self._targets = Targets(self.urls)
        self._live = LiveStreams()
        self._client = client
        self._connect_timeout = connect_timeout
        self._transport: Transport | None = None

    async def __aenter__(self) -> Self:
        self._transport = HttpxTransport(
            max_connections=self.max_connections, connect_timeout=self._connect_timeout, client=self._client
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every stream and connection."""
        for live in self._live.all():
            await live.close()
        if self._transport is not None:
            await self._transport.aclose()

    async def stream(self, call: Call) -> AsyncIterator[Sequence[StreamEvent]]:
        """Send one attempt; yield one batch of events per read, an empty one first, one StreamEnd last."""
        decoder = AttemptDecoder(call, text=self._text, event_limit=self._event_limit)
        live = self._live.add(call.rid, self._targets.pick(anyio.current_time()))
        try:
            ending = await self._open(call, live)
            if ending is not None:
                yield (ending,)
                return
            response = live.response
            assert response is not None
            yield ()
            while not decoder.ended:
                events = await self._read(live, response, decoder)
                if events:
                    yield events
            await _drain(response)
        finally:
            self._live.remove(live)
            if live.response is not None:
                await live.response.close()

    async def _open(self, call: Call, live: LiveStream) -> StreamEnd | None:
        """Send the request; the end if there will be no stream, else None and `live.response` is set."""
        if self._transport is None:
            raise ConfigurationError(
                "SGLangBackend is not open: use it as `async with SGLangBackend(…) as backend`"
            )
        try:
            body = request_body(call)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as problem:
            return end(Answer.NOT_SENT, f"the request cannot be written as JSON: {problem}")
        headers = request_headers(self._secret, call.routing_key)
        try:
            with live.scope:
                live.response = await self._transport.open(f"{live.url}/generate", body, headers)
        except ConnectFailed as problem:
            self._targets.refused(live.url, anyio.current_time())
            return end(Answer.NO_CONNECTION, f"{live.url}: {problem}")
        except StreamCut as problem:
            return end(Answer.CUT, f"{live.url}: {problem}")
        if live.response is None:
            return end(Answer.CLOSED, "closed before the server answered")
        self._targets.answered(live.url)
        return await self._refusal(live.response)

    async def _refusal(self, response: Response) -> StreamEnd | None:
        """The end that an answer is which is no event stream; the status counts before the content type."""
        if response.status != OK:
            words = self._secret.redact(await _words(response))
            return end(http_answer(response.status), words, status=response.status)
        content_type = response.headers.get("content-type", "")
        if content_type and not content_type.lower().startswith("text/event-stream"):
            words = self._secret.redact(await _words(response))
            return end(Answer.MALFORMED, f"HTTP 200 with {content_type}, not an event stream: {words}")
        return None

    async def _read(
        self, live: LiveStream, response: Response, decoder: AttemptDecoder
    ) -> Sequence[StreamEvent]:
        try:
            data = await response.read()
        except StreamCut as problem:
            if live.closed:
                return (decoder.close(Answer.CLOSED, "closed from this side"),)
            return (decoder.close(Answer.CUT, str(problem)),)
        if data:
            return decoder.feed(data)
        return (decoder.close(Answer.EOF, "the body ended without a terminal chunk"),)


async def _drain(response: Response) -> None:
    """Read the rest after the last chunk, so that the connection can be used again; never for long."""
    with anyio.move_on_after(DRAIN_S):
        try:
            while await response.read():
                pass
        except StreamCut:
            pass


async def _words(response: Response) -> str:
    """What an error body says, cut short."""
    body = b""
    with anyio.move_on_after(ERROR_BODY_S):
        try:
            while len(body) < ERROR_BODY_BYTES and (data := await response.read()):
                body += data
        except StreamCut:
            pass
    text = body[:ERROR_BODY_BYTES].decode("utf-8", "replace")
    return _message(text) or text or f"HTTP {response.status}"


def _message(text: str) -> str | None:
    """The message of a JSON error, in the shapes that SGLang and its router use."""
    try:
        found = msgspec.json.decode(text.removeprefix("data: "))
    except (msgspec.MsgspecError, RecursionError):
        return None
    for key in ("error", "message", "detail"):
        if not isinstance(found, dict):
            break
        if key in found:
            found = found[key]
    if isinstance(found, dict):
        found = found.get("message", found)
    return str(found)
