"""The streams that are open now: where each went, and how to close one from outside."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from adapters.sglang.transport import Response


@dataclass(slots=True, eq=False)
class LiveStream:
    """One open stream. `close` makes it end as lost, wherever it is: connecting, waiting, or in mid-body."""

    rid: str
    url: str
    closed: bool = False
    aborts: int = 0
    response: Response | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def close(self) -> None:
        """Close the connection; the reader of the stream sees it break."""
        self.closed = True
        if self.response is None:
            self.scope.cancel()
        else:
            await self.response.close()


class LiveStreams:
    """Open streams by rid."""

    def __init__(self) -> None:
        self._streams: dict[str, LiveStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, rid: str, url: str) -> LiveStream:
        """Register a stream that is about to be opened at `url`."""
        live = self._streams[rid] = LiveStream(rid, url)
        return live

    def remove(self, live: LiveStream) -> None:
        """Forget a stream that is over."""
        if self._streams.get(live.rid) is live:
            del self._streams[live.rid]

    def get(self, rid: str) -> LiveStream | None:
        """The open stream of `rid`, if any."""
        return self._streams.get(rid)

    def all(self) -> list[LiveStream]:
        """Every open stream."""
        return list(self._streams.values())
