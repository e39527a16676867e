"""Control calls: one request, one whole answer, one time-out for all of it; and many of them at once, bounded.

They go over connections of their own, so that none ever queues behind a stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio
import msgspec

from adapters.sglang.outgoing import Secret
from adapters.sglang.transport import ConnectFailed, StreamCut, Transport
from adapters.sglang.words import said

BODY_LIMIT = 4 * 1024 * 1024
T = TypeVar("T")
R = TypeVar("R")


class NoAnswer(Exception):
    """A control call got no answer; `timed_out` says whether for lack of time."""

    def __init__(self, words: str, *, timed_out: bool = False) -> None:
        super().__init__(words)
        self.timed_out = timed_out


class Reply:
    """One whole answer to a control call."""

    __slots__ = ("body", "content_type", "status")

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        self.status = status
        self.content_type = content_type
        self.body = body

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return self.status // 100 == 2  # noqa: PLR2004

    def json(self) -> Any:
        """The body as JSON, None if it is none."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def words(self) -> str:
        """Status and message in a few words."""
        return f"HTTP {self.status}: {said(self.body)}" if self.body.strip() else f"HTTP {self.status}"


class Asker:
    """Makes control calls. `timeout` is in seconds for each; a deadline of the caller's shortens it."""

    def __init__(self, transport: Transport, secret: Secret, timeout: float) -> None:
        self._transport = transport
        self._secret = secret
        self.timeout = timeout

    async def ask(self, method: str, url: str, body: Any = None, *, timeout: float | None = None) -> Reply:
        """Send and read the whole answer. Raises NoAnswer."""
        limit = self.timeout if timeout is None else min(timeout, self.timeout)
        content = None if body is None else msgspec.json.encode(body)
        try:
            with anyio.fail_after(max(0.0, limit)):
                return await self._exchange(method, url, content)
        except TimeoutError:
            raise NoAnswer(f"no answer within {limit:.3g} s", timed_out=True) from None
        except (ConnectFailed, StreamCut) as problem:
            raise NoAnswer(self._secret.redact(str(problem))) from None

    async def _exchange(self, method: str, url: str, content: bytes | None) -> Reply:
        response = await self._transport.open(method, url, content, self._secret.headers)
        try:
            body = bytearray()
            while data := await response.read():
                body += data
                if len(body) > BODY_LIMIT:
                    raise StreamCut(f"an answer of more than {BODY_LIMIT} bytes")
            text = self._secret.redact_bytes(bytes(body))
            return Reply(response.status, response.headers.get("content-type", ""), text)
        finally:
            await response.close()


async def spread(work: Callable[[T], Awaitable[R]], items: Sequence[T], limit: int) -> list[R]:
    """`work` on each of `items`, at most `limit` at a time; the results in the order of the items."""
    results: dict[int, R] = {}
    queue = iter(enumerate(items))

    async def run() -> None:
        for index, item in queue:
            results[index] = await work(item)

    async with anyio.create_task_group() as tasks:
        for _ in range(min(limit, len(items))):
            tasks.start_soon(run)
    return [results[index] for index in range(len(items))]
