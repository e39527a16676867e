"""A chunked body without a socket: the bytes of a connection in, the bytes of the body out (RFC 9112, section 7.1).

A server sends each token as a chunk of its own, and a general HTTP parser makes an event of each: at a thousand
streams that is most of what a client does. Here all chunks of one read come out together.
"""

from __future__ import annotations

import re

LINE_LIMIT = 16 * 1024
"""Bytes of a line between chunks at most, and of the trailer as a whole."""

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_BEGINNING = re.compile(rb"[0-9A-Fa-f]{1,15}(?:[ \t]*|[ \t]*;[^\r\n]*)\r?")
_CRLF = b"\r\n"


class NotChunked(ValueError):
    """The bytes are no chunked body; the message says what was found."""


class ChunkedBody:
    """Decodes one body. After its end `complete` is true and `rest` holds what came behind it."""

    __slots__ = ("_left", "_line", "_tail", "_trailer", "complete", "rest")

    def __init__(self) -> None:
        self.complete = False
        self.rest = b""
        self._left = 0  # bytes of the present chunk that are still to come
        self._tail = False  # whether the line break behind the present chunk is still to come
        self._line = b""  # an unfinished line between chunks
        self._trailer: int | None = None  # bytes of the trailer so far; None before it begins

    def feed(self, data: bytes) -> bytes:
        """What these bytes add to the body. Raises NotChunked."""
        if self._line:
            data = self._line + data
            self._line = b""
        parts: list[bytes] = []
        at, size = 0, len(data)
        while at < size and not self.complete:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
            elif self._tail:
                at = self._line_break(data, at)
            elif self._trailer is None:
                at = self._chunk(data, at, parts)
            else:
                at = self._trailer_line(data, at)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _line_break(self, data: bytes, at: int) -> int:
        """Pass over the line break behind a chunk."""
        found = data[at : at + 2]
        if found == b"\r":
            self._line = found
        elif found != _CRLF:
            raise NotChunked(f"a chunk is longer than its size says: {data[at : at + 20]!r}")
        else:
            self._tail = False
        return at + len(found)

    def _chunk(self, data: bytes, at: int, parts: list[bytes]) -> int:
        """Take whole chunks as long as there are any, then begin with what is there of the next."""
        size = len(data)
        while head := _SIZE_LINE.match(data, at):
            length = int(head[1], 16)
            at = head.end()
            if not length:
                self._trailer = 0
                return at
            end = at + length
            if end + 2 > size or data[end : end + 2] != _CRLF:
                self._left, self._tail = length, True
                return at
            parts.append(data[at:end])
            at = end + 2
        return self._unfinished(data, at)

    def _unfinished(self, data: bytes, at: int) -> int:
        """Keep a size line that is not whole yet."""
        line = data[at:]
        if line and (not _BEGINNING.fullmatch(line) or len(line) > LINE_LIMIT):
            raise NotChunked(f"not the size of a chunk: {line[:20]!r}")
        self._line = line
        return len(data)

    def _trailer_line(self, data: bytes, at: int) -> int:
        """Pass over one line of the trailer; an empty one ends the body."""
        end = data.find(_CRLF, at)
        passed = (len(data) if end < 0 else end + 2) - at
        assert self._trailer is not None
        if self._trailer + passed > LINE_LIMIT:
            raise NotChunked(f"a trailer of more than {LINE_LIMIT} bytes")
        if end < 0:
            self._line = data[at:]
            return len(data)
        self._trailer += passed
        if end == at:
            self.complete = True
            self.rest = data[end + 2 :]
        return end + 2
