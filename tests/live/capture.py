"""Read a stream byte by byte as it comes, do things to the server meanwhile, and write both down.

A recorded stream is two files: ``NAME.sse``, the body as received after de-chunking, and ``NAME.json`` beside it:

- ``recorded_from``  versions, stream mode, and whether a router was in between
- ``request``        method, path, body
- ``status``, ``headers`` of the answer
- ``reads``          length of each socket read, so that a replay can cut the bytes at the same places
- ``during``         control calls made while the stream was open, each with the number of reads before it
- ``ended``          ``complete``, or how the body was cut off

An answer that is no stream is ``NAME.json`` alone, with ``body`` in it.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from tests.live.processes import Router, Running, Server

STREAM_DEADLINE = 60.0
"""Seconds in which anything awaited on a stream must have happened."""
UNINTERESTING = frozenset({"date"})
NUMBERS = re.compile(r"\[[-\d\s,.e]+\]")
"""A list of numbers as ``json.dumps`` spreads it over lines."""


class ShapeMissed(Exception):
    """The server did not show the shape that was to be recorded, or not in time."""


@dataclass
class Stream:
    """A ``/generate`` call in progress. ``reads`` grows as bytes arrive."""

    base: str
    body: dict[str, Any]
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    reads: list[bytes] = field(default_factory=list)
    during: list[dict[str, Any]] = field(default_factory=list)
    ended: str | None = None
    _events: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def raw(self) -> bytes:
        """All bytes so far."""
        return b"".join(self.reads)

    @property
    def payloads(self) -> list[str]:
        """The complete ``data:`` lines so far, without the prefix."""
        return [part.removeprefix("data: ") for part in self.raw.decode().split("\n\n")[:-1]]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The complete JSON payloads so far."""
        return [json.loads(payload) for payload in self.payloads if payload != "[DONE]"]

    async def shows(self, count: int) -> None:
        """Wait for this many payloads.

        Raises:
            ShapeMissed: the stream ended, or a minute passed, before that.
        """
        await self._until(lambda: self._events >= count or self.ended is not None, f"{count} payloads")
        if len(self.payloads) < count:
            raise ShapeMissed(
                f"the stream ended ({self.ended}) after {len(self.payloads)} payloads; {count} wanted"
            )

    async def opens(self) -> None:
        """Wait for the answer's head."""
        await self._until(lambda: self.status != 0 or self.ended is not None, "the head of the answer")

    async def ends(self) -> None:
        """Wait for the end of the body, however it comes."""
        await self._until(lambda: self.ended is not None, "the end")

    async def _until(self, condition: Any, what: str) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(condition), STREAM_DEADLINE)
            except TimeoutError:
                raise ShapeMissed(
                    f"no sign of {what} in {STREAM_DEADLINE:.0f} s; seen: {self.payloads[-2:]}"
                ) from None

    async def run(self, client: httpx.AsyncClient) -> None:
        """Send the request and read until the body ends."""
        try:
            async with client.stream("POST", f"{self.base}/generate", json=self.body) as answer:
                await self._note(status=answer.status_code, headers=interesting(answer.headers))
                async for data in answer.aiter_raw():
                    await self._note(data=data)
            await self._note(ended="complete")
        except httpx.HTTPError as cut:
            await self._note(ended=f"{type(cut).__name__}: {cut}")

    async def _note(
        self,
        *,
        status: int = 0,
        headers: dict[str, str] | None = None,
        data: bytes = b"",
        ended: str | None = None,
    ) -> None:
        async with self._changed:
            self.status = status or self.status
            self.headers = headers or self.headers
            if data:
                self.reads.append(data)
                self._events += data.count(
                    b"\n\n"
                )  # A server writes whole events; counting must not slow it down.
            self.ended = ended or self.ended
            self._changed.notify_all()


def interesting(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of an answer without those that say nothing about the protocol."""
    return {name.lower(): value for name, value in headers.items() if name.lower() not in UNINTERESTING}


@dataclass
class Recorder:
    """Opens streams, makes control calls, and writes files into ``directory``."""

    directory: Path
    sglang: str
    router: str
    home: str
    client: httpx.AsyncClient
    written: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def stream(self, target: Running, body: dict[str, Any]) -> AsyncIterator[Stream]:
        """Open a stream and read it in the background; it has ended, or is closed, when the block is left."""
        stream = Stream(target.url, {"stream": True, "return_logprob": True, **body})
        task = asyncio.create_task(stream.run(self.client))
        try:
            yield stream
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def control(
        self, target: Running, path: str, body: dict[str, Any], stream: Stream | None = None
    ) -> httpx.Response:
        """POST a control call, and note it in the stream that is open meanwhile."""
        before = len(stream.reads) if stream else 0
        answer = await self.client.post(target.url + path, json=body)
        if stream:
            entry = {"reads_before": before, "method": "POST", "path": path, "body": body}
            stream.during.append({**entry, "status": answer.status_code, "answer": answer.text})
        return answer

    async def waiting(self, server: Server, count: int) -> None:
        """Wait until so many requests queue in the scheduler."""
        until = time.monotonic() + STREAM_DEADLINE
        while (seen := await asyncio.to_thread(server.loads))[1] != count:
            if time.monotonic() > until:
                raise ShapeMissed(f"{server.name}: {seen} requests run and wait, {count} waiting wanted")
            await asyncio.sleep(0.02)

    async def idle(self, server: Server) -> None:
        """Wait until the server runs and queues nothing."""
        until = time.monotonic() + STREAM_DEADLINE
        while (seen := await asyncio.to_thread(server.loads)) != (0, 0):
            if time.monotonic() > until:
                raise ShapeMissed(f"{server.name}: {seen} requests still run and wait")
            await asyncio.sleep(0.02)

    def save_stream(self, name: str, target: Running, stream: Stream) -> None:
        """Write ``NAME.sse`` and ``NAME.json``."""
        self.directory.joinpath(f"{name}.sse").write_bytes(stream.raw)
        facts = {
            "recorded_from": self._source(target),
            "request": {"method": "POST", "path": "/generate", "body": stream.body},
            "status": stream.status,
            "headers": stream.headers,
            "reads": [len(data) for data in stream.reads],
            "during": stream.during,
            "ended": stream.ended,
        }
        self._write(name, facts)

    async def save_either(self, name: str, target: Running, body: Any) -> None:
        """Send a ``/generate`` body that some versions refuse at once, and others within a stream."""
        stream = Stream(target.url, body)
        await stream.run(self.client)
        if stream.status == HTTPStatus.OK:
            self.save_stream(name, target, stream)
        else:
            await self.save_answer(name, target, "POST", "/generate", body)

    async def save_answer(
        self,
        name: str,
        target: Running,
        method: str,
        path: str,
        body: Any = None,
        keep: frozenset[str] | None = None,
    ) -> httpx.Response:
        """Make a call that is no stream and write ``NAME.json``; ``keep`` names the keys of a large answer to keep."""
        answer = await self.client.request(method, target.url + path, json=body)
        if answer.headers.get("content-type", "").startswith("text/event-stream") and answer.is_success:
            raise ShapeMissed(f"{name}: wanted an answer that is no stream")
        content: Any = answer.text
        if answer.headers.get("content-type", "").startswith("application/json"):
            content = answer.json()
        facts = {
            "recorded_from": self._source(target),
            "request": {"method": method, "path": path, "body": body},
            "status": answer.status_code,
            "headers": interesting(answer.headers),
            "body": {key: value for key, value in content.items() if key in keep} if keep else content,
        }
        self._write(name, facts | ({"kept_keys_only": True} if keep else {}))
        return answer

    def _source(self, target: Running) -> dict[str, str | None]:
        modes = (
            {w.mode for w in target.workers}
            if isinstance(target, Router)
            else {getattr(target, "mode", None)}
        )
        mode = modes.pop() if len(modes) == 1 else "both"
        return {
            "sglang": self.sglang,
            "router": self.router if isinstance(target, Router) else None,
            "mode": mode,
        }

    def _write(self, name: str, facts: dict[str, Any]) -> None:
        text = json.dumps(facts, indent=1, ensure_ascii=False)
        text = NUMBERS.sub(
            lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text
        )
        # An error of SGLang's names the file that raised it; the path of this machine says nothing.
        text = text.replace(self.home, "/env")
        self.directory.joinpath(f"{name}.json").write_text(text + "\n")
        self.written.append(name)
