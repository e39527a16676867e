"""Bytes in, payloads of server-sent events out: sans-IO, incremental, bounded.

The lines of the text/event-stream format, cut anywhere, also inside a UTF-8 character or between CR and LF. Only
`data` matters here: SGLang 0.5.23 sends neither `event` nor `id` nor comments, but proxies on the way may.
"""

from __future__ import annotations

from lifecycle.errors import StreamMalformed

DEFAULT_EVENT_LIMIT = 128 * 1024 * 1024
"""Bytes of one event. A terminal chunk with the routed experts of 32k tokens is tens of MB."""

BOM = b"\xef\xbb\xbf"
FRAME = len("data: \n\n")


class SSEDecoder:
    """The events of one stream.

    `feed` takes what one socket read brought and returns the payloads of the events it completed: the `data` lines
    of each, joined by newlines, as raw bytes. An event without data is skipped. What is not closed by a blank line
    when the stream ends is no event. An event above `limit` bytes breaks the decoder: payloads before it are still
    returned, `broken` says why, and the next `feed` raises StreamMalformed.
    """

    __slots__ = ("_after_cr", "_begun", "_lines", "_parts", "_size", "broken", "limit")

    def __init__(self, limit: int = DEFAULT_EVENT_LIMIT) -> None:
        self.limit = limit
        self.broken: str | None = None
        self._parts: list[bytes] = []  # pieces of a line that has no end yet
        self._lines: list[bytes] = []  # data lines of an event that has no end yet
        self._size = 0  # bytes in both
        self._after_cr = False
        self._begun = False

    @property
    def pending(self) -> int:
        """Bytes of an event that has begun and not ended."""
        return self._size

    def feed(self, data: bytes) -> list[bytes]:
        """Take the bytes of one read; return the payloads they completed. Raises StreamMalformed once broken."""
        if self.broken is not None:
            raise StreamMalformed(self.broken)
        if self._after_cr or data.find(b"\r") >= 0:
            data = self._unify(data)
        if (
            not self._size
            and data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n")
            and len(data) - FRAME < self.limit
        ):
            self._begun = True
            return [data[6:-2]]  # one whole event of one line: what a server sends per token
        return self._split(data)

    def _unify(self, data: bytes) -> bytes:
        """Turn CRLF and CR into LF; a CR that ends a read ends its line at once, and an LF after it is dropped."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
            self._after_cr = False
        if data:
            self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _split(self, data: bytes) -> list[bytes]:
        payloads: list[bytes] = []
        at = 0
        while (stop := data.find(b"\n", at)) >= 0:
            if self._size == 0 and data.startswith(b"data: ", at) and data[stop + 1 : stop + 2] == b"\n":
                self._begun = True
                if stop - at - len("data: ") >= self.limit:
                    self._break()
                    return payloads
                payloads.append(data[at + len("data: ") : stop])  # a whole event of one line, copied once
                at = stop + 2
                continue
            line = data[at:stop]
            at = stop + 1
            if self._parts:
                self._size -= sum(map(len, self._parts))
                line = b"".join((*self._parts, line))
                self._parts = []
            self._line(line, payloads)
            if self.broken is not None:
                return payloads
        if at < len(data):
            self._parts.append(data[at:] if at else data)
            self._size += len(data) - at
        self._check(FRAME)  # the field name of an unfinished line is counted, of a finished one it is not
        return payloads

    def _line(self, line: bytes, payloads: list[bytes]) -> None:
        if not self._begun:
            line = line.removeprefix(BOM)
            self._begun = True
        if line.startswith(b"data: "):
            self._keep(line[6:])
        elif not line:
            if self._lines and self._check():
                payloads.append(self._lines[0] if len(self._lines) == 1 else b"\n".join(self._lines))
            self._lines.clear()
            self._size = 0
        elif line.startswith(b"data:"):
            self._keep(line[5:])
        elif line == b"data":
            self._keep(b"")
        else:
            self._check(FRAME - len(line))  # a comment or another field: skipped, but bounded like the rest

    def _keep(self, value: bytes) -> None:
        self._lines.append(value)
        self._size += len(value) + 1

    def _check(self, allowance: int = 0) -> bool:
        if self._size > self.limit + allowance:
            self._break()
        return self.broken is None

    def _break(self) -> None:
        self.broken = f"an event of more than {self.limit} bytes"
