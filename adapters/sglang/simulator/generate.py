"""``/generate`` as a bare ASGI endpoint: the inner loop is one poll and one send per chunk.

It is not a Starlette response because a simulated fault must be able to do what a response object cannot: keep the
headers back, and leave the body unfinished, so that the connection breaks.
"""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec
from starlette.types import Message, Receive, Scope, Send

from adapters.sglang.simulator.brain import ServerDead
from adapters.sglang.simulator.pump import Pump
from adapters.sglang.simulator.request import Mark, Request
from adapters.sglang.simulator.responses import Head
from adapters.sglang.simulator.schema import BadBody

_encode = msgspec.json.encode


async def _read_body(receive: Receive) -> bytes | None:
    """The whole request body, or None when the client left before it was complete."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _start(head: Head) -> Message:
    headers = [(b"content-type", head.media_type.encode())]
    return {"type": "http.response.start", "status": head.status, "headers": headers}


class GenerateEndpoint:
    """Serves one request per call: submit, then poll and send until the response ends or the client leaves."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        body = await _read_body(receive)
        if body is None:
            return
        try:
            request = self._pump.brain.submit(body)
        except BadBody as error:
            await send(_start(Head(400, "application/json")))
            await send({"type": "http.response.body", "body": _encode(error.body)})
            return
        except ServerDead:
            return
        self._pump.nudge()
        gone = asyncio.ensure_future(receive())
        try:
            await self._respond(request, gone, send)
        finally:
            gone.cancel()
            self._pump.brain.disconnect(request)
            self._pump.nudge()
            if request.stream:
                delay = self._pump.brain.settings.late_abort_delay
                asyncio.get_running_loop().call_later(delay, self._abort_late, request.rid)

    def _abort_late(self, rid: str) -> None:
        """SGLang's second look at a stream that has ended: whoever holds its rid now is aborted."""
        if rid in self._pump.brain.live:
            self._pump.brain.abort_known(rid)
            self._pump.nudge()

    async def _respond(self, request: Request, gone: asyncio.Future[Message], send: Send) -> None:
        brain, ready = self._pump.brain, asyncio.Event()
        request.on_ready = ready.set
        gone.add_done_callback(lambda _: ready.set())
        started = False
        while not gone.done():
            ready.clear()
            head = brain.head(request)
            if head is not None and not started:
                started = True
                await send(_start(head))
            parts = brain.poll(request)
            if parts:
                mark = parts.pop() if isinstance(parts[-1], Mark) else None
                data = b"".join(cast("list[bytes]", parts))
                await send({"type": "http.response.body", "body": data, "more_body": mark is not Mark.END})
                if mark is not None:
                    return  # After CUT the response is unfinished, and the server closes the connection under it.
            await ready.wait()
