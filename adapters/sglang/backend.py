"""`SGLangBackend`: one SGLang server, several, or a router with servers behind it, as a backend of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio
import httpx
import msgspec

from adapters.sglang.aborting import Aborter, Strategy
from adapters.sglang.answers import Answer, end, http_answer
from adapters.sglang.asking import Asker
from adapters.sglang.attempt import AttemptDecoder
from adapters.sglang.control import Control, Tokenizer
from adapters.sglang.live import LiveStream, LiveStreams
from adapters.sglang.outgoing import Targets, base_url, base_urls, read_secret, request_body, request_headers
from adapters.sglang.settings import TransportSettings, checked_strategy, positive
from adapters.sglang.sse import DEFAULT_EVENT_LIMIT
from adapters.sglang.topology import Topologies, Topology
from adapters.sglang.transport import CLOSE_TIMEOUT_S, ConnectFailed, Response, StreamCut, Transport
from adapters.sglang.words import said
from lifecycle.backend import AbortReceipt, Call, CallRef, UpdateMode, WorkerReceipt
from lifecycle.errors import ConfigurationError
from lifecycle.events import Accepted, StreamEnd, StreamEvent

OK = 200
ERROR_BODY_BYTES = 8192
ERROR_BODY_S = 5.0
DRAIN_S = 0.25
INTRODUCE_S = 0.5
NO_END = "the body ended without a terminal chunk"


@dataclass(frozen=True, slots=True)
class _Open:
    """What exists while the backend is open."""

    streams: Transport
    controls: Transport
    topologies: Topologies
    aborter: Aborter
    control: Control


class SGLangBackend:
    """A `lifecycle.backend.Backend` over SGLang. Use it as an async context manager.

    `url` is a server or a router; several URLs are servers without a router, used in turn. Settings:

    - `workers`: the servers behind the router, instead of asking it.
    - `api_key`, or `api_key_env` (the name of an environment variable): sent to router and workers alike, shown nowhere.
    - `strategy`: how aborts are made, see `Strategy`. `abort_all` is not a strategy to choose: it is what
      `abort(everything=True)` does.
    - `max_connections`: the most streams that will be open at once (None: no limit is set here).
    - `transport`: `fast` (the extra of that name, asyncio only), `httpx`, or `auto`: fast where that is possible.
    - `client`: an `httpx.AsyncClient` of yours for the streams; it is checked, used, and not closed.
    - `text`: whether slices carry text (never needed to resume).
    - `tokenizer`: called with a text prompt, returns its token ids; without it a worker is asked.
    - `connect_timeout`, `control_timeout`: seconds to connect, and for one whole control call. Streams have no read
      time-out: the engine watches them.

    Faults of servers are events and receipts. Raises ConfigurationError for settings that cannot be used.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        workers: Sequence[str] | None = None,
        api_key: str | None = None,
        api_key_env: str | None = None,
        strategy: Strategy | str = Strategy.AUTO,
        max_connections: int | None = None,
        transport: str = "auto",
        text: bool = False,
        tokenizer: Tokenizer | None = None,
        client: httpx.AsyncClient | None = None,
        connect_timeout: float = 10.0,
        control_timeout: float = 10.0,
        event_limit: int = DEFAULT_EVENT_LIMIT,
    ) -> None:
        self.urls = base_urls(url)
        self.max_connections = max_connections
        self._settings = TransportSettings(transport, max_connections, connect_timeout, client)
        self._strategy = checked_strategy(strategy)
        self._given = None if workers is None else base_urls(workers)
        self._secret = read_secret(api_key, api_key_env)
        self._text = text
        self._event_limit = positive("event_limit", event_limit)
        self._control_timeout = positive("control_timeout", control_timeout)
        self._tokenizer = tokenizer
        self._targets = Targets(self.urls)
        self._live = LiveStreams()
        self._open: _Open | None = None

    def __repr__(self) -> str:
        return f"SGLangBackend({', '.join(self.urls)})"

    async def __aenter__(self) -> Self:
        """Make the connections' pools; no server is asked anything yet. Raises ConfigurationError."""
        if self._open is not None:
            raise ConfigurationError("this SGLangBackend is open already")
        streams, controls = self._settings.build()
        asker = Asker(controls, self._secret, self._control_timeout)
        topologies = Topologies(asker, self.urls, self._given)
        self._open = _Open(
            streams,
            controls,
            topologies,
            Aborter(asker, topologies, self._live, self._strategy),
            Control(asker, topologies, self._tokenizer),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every stream and connection."""
        parts, self._open = self._open, None
        for live in self._live.all():
            await live.close()
        if parts is not None:
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await parts.streams.aclose()
                await parts.controls.aclose()

    @property
    def transport(self) -> str:
        """The transport in use: `fast` or `httpx`."""
        return self._parts.streams.name

    @property
    def _parts(self) -> _Open:
        if self._open is None:
            raise ConfigurationError(
                f"{self!r} is not open: use it as `async with SGLangBackend(…) as backend`"
            )
        return self._open

    def worker_of(self, rid: str) -> str | None:
        """The worker that serves the open stream of `rid`; None where a router hides it, or before it is known."""
        live = self._live.get(rid)
        if live is None or self._open is None:
            return None
        topology = self._open.topologies.known(live.url)
        return live.url if topology is not None and topology.sure and topology.direct else None

    async def topology(self, url: str | None = None) -> Topology:
        """What is behind `url` (the first one by default), and how that is known."""
        return await self._parts.topologies.get(self.urls[0] if url is None else base_url(url))

    async def abort(
        self, calls: Sequence[CallRef], *, deadline: float, everything: bool = False
    ) -> Sequence[AbortReceipt]:
        """Ask the workers to end `calls`; with `everything`, all they hold. See `Aborter`."""
        return await self._parts.aborter.abort(calls, deadline=deadline, everything=everything)

    async def pause(self, mode: UpdateMode, *, deadline: float) -> Sequence[WorkerReceipt]:
        """Pause generation on every worker."""
        return await self._parts.control.pause(mode, deadline=deadline)

    async def resume(self, version: str | None, *, deadline: float) -> Sequence[WorkerReceipt]:
        """Publish `version` where it is not None, and continue generation on every worker."""
        return await self._parts.control.resume(version, deadline=deadline)

    async def workers(self, *, deadline: float) -> Sequence[WorkerReceipt]:
        """Every worker's label and load."""
        return await self._parts.control.workers(deadline=deadline)

    async def health(self, *, deadline: float) -> Sequence[WorkerReceipt]:
        """Whether every worker is healthy by its own account."""
        return await self._parts.control.health(deadline=deadline)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, as a worker spells it. Raises BackendUnreachable."""
        return await self._parts.control.detokenize(tokens)

    async def tokenize(self, text: str) -> Sequence[int]:
        """Token ids of `text`. Raises BackendUnreachable when no worker can say."""
        return await self._parts.control.tokenize(text)

    async def stream(self, call: Call) -> AsyncIterator[Sequence[StreamEvent]]:
        """Send one attempt; yield one batch of events per read, `Accepted` first, one StreamEnd last."""
        decoder = AttemptDecoder(call, text=self._text, event_limit=self._event_limit)
        live = self._live.add(call.rid, self._targets.pick(anyio.current_time()))
        try:
            ending = await self._send(call, live)
            if ending is not None:
                yield (ending,)
                return
            response = live.response
            assert response is not None
            yield (Accepted(await self._server(live)),)
            while not decoder.ended:
                events: Sequence[StreamEvent]
                try:
                    data = await response.read()
                except StreamCut as problem:
                    events = (_broken(live, decoder, problem),)
                else:
                    events = decoder.feed(data) if data else (decoder.close(Answer.EOF, NO_END),)
                if events:
                    yield events
        finally:
            self._live.remove(live)
            if live.response is not None:
                await _leave(live.response, drain=decoder.complete)

    async def _server(self, live: LiveStream) -> str | None:
        """Who serves a stream that has begun. The first streams wait a moment until it is known what their URL is."""
        if self._open is not None and self._open.topologies.known(live.url) is None:
            with anyio.move_on_after(INTRODUCE_S):
                await self._open.topologies.introduce(live.url)
        return self.worker_of(live.rid)

    async def _send(self, call: Call, live: LiveStream) -> StreamEnd | None:
        """Send the request; the end if there will be no stream, else None and `live.response` is set."""
        transport = self._parts.streams
        try:
            body = request_body(call)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as problem:
            return end(Answer.NOT_SENT, f"the request cannot be written as JSON: {problem}")
        headers = request_headers(self._secret, call.routing_key)
        try:
            with live.scope:
                live.response = await transport.open("POST", f"{live.url}/generate", body, headers)
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
            answer = http_answer(response.status, response.headers.get("x-smg-error-code"))
            return end(answer, words, status=response.status)
        content_type = response.headers.get("content-type", "")
        if content_type and not content_type.lower().startswith("text/event-stream"):
            words = self._secret.redact(await _words(response))
            return end(Answer.MALFORMED, f"HTTP 200 with {content_type}, not an event stream: {words}")
        return None


def _broken(live: LiveStream, decoder: AttemptDecoder, problem: StreamCut) -> StreamEnd:
    if live.closed:
        return decoder.close(Answer.CLOSED, "closed from this side")
    return decoder.close(Answer.CUT, str(problem))


async def _leave(response: Response, *, drain: bool) -> None:
    """Close; with `drain` read the rest after the last chunk first, so that the connection can be used again."""
    try:
        if drain:
            with anyio.move_on_after(DRAIN_S), suppress(StreamCut):
                while await response.read():
                    pass
    finally:
        await response.close()


async def _words(response: Response) -> str:
    """What an error body says, cut short."""
    body = b""
    with anyio.move_on_after(ERROR_BODY_S), suppress(StreamCut):
        while len(body) < ERROR_BODY_BYTES and (data := await response.read()):
            body += data
    return said(body[:ERROR_BODY_BYTES]) or f"HTTP {response.status}, empty body"
