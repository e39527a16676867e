"""The server-sent events decoder."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.sglang.sse import SSEDecoder
from lifecycle.errors import StreamMalformed

CASES = {
    "one event": (b"data: a\n\n", [b"a"]),
    "two events in one read": (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
    "no space after the colon": (b"data:a\n\n", [b"a"]),
    "only one space is taken": (b"data:  a\n\n", [b" a"]),
    "CRLF": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "CR": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "mixed line ends": (b"data: a\r\n\ndata: b\n\r\ndata: c\r\r\n", [b"a", b"b", b"c"]),
    "several lines": (b"data: a\ndata: b\n\n", [b"a\nb"]),
    "empty data": (b"data\n\ndata:\n\ndata: \n\n", [b"", b"", b""]),
    "an empty line in the data": (b"data:\ndata: x\n\n", [b"\nx"]),
    "comments": (b": hello\n\n:\ndata: a\n: in between\n\n", [b"a"]),
    "other fields": (b"event: x\nid: 1\nretry: 5\ndata: a\n\nevent: only\n\n", [b"a"]),
    "a field that begins like data": (b"database: no\ndata: a\n\n", [b"a"]),
    "no blank line at the end": (b"data: a\n\ndata: b\n", [b"a"]),
    "cut in a line": (b"data: a\n\ndata: {", [b"a"]),
    "blank lines only": (b"\n\n\r\n\r\n", []),
    "a byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "a byte order mark later is part of a name": (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),
    "UTF-8": ("data: „é😀“\n\n".encode(), ["„é😀“".encode()]),
    "nothing": (b"", []),
}


def feed(*reads: bytes, limit: int = 1000) -> list[bytes]:
    """All payloads of `reads`."""
    decoder = SSEDecoder(limit)
    return [payload for read in reads for payload in decoder.feed(read)]


@pytest.mark.parametrize(("data", "payloads"), CASES.values(), ids=CASES)
def test_payloads(data: bytes, payloads: list[bytes]) -> None:
    """A body gives its payloads, in one read."""
    assert feed(data) == payloads


@pytest.mark.parametrize(("data", "payloads"), CASES.values(), ids=CASES)
def test_byte_by_byte(data: bytes, payloads: list[bytes]) -> None:
    """The same body byte by byte gives the same payloads."""
    assert feed(*(data[at : at + 1] for at in range(len(data)))) == payloads


@given(
    parts=st.lists(
        st.sampled_from(
            [b"data: ", b"data:", b"data", b":", b"\n", b"\r", b"\r\n", b"x", b"\n\n", "é".encode(), b" "]
        ),
        max_size=40,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_splits_do_not_matter(parts: list[bytes], cuts: list[int]) -> None:
    """Any text, cut anywhere, gives what it gives in one piece."""
    data = b"".join(parts)
    at = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[start:stop] for start, stop in pairwise(at)]
    assert feed(*pieces) == feed(data)


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("size", [98, 99, 100, 101, 120])
def test_limit(size: int, step: int) -> None:
    """An event above the limit breaks the decoder, however it arrives; the payloads before it are kept."""
    decoder = SSEDecoder(limit=100)
    data = b"data: first\n\ndata: " + b"x" * size + b"\n\ndata: after\n\n"
    payloads: list[bytes] = []
    broke = False
    for at in range(0, len(data), step):
        if decoder.broken is not None:
            broke = True
            break
        payloads += decoder.feed(data[at : at + step])
    broke = broke or decoder.broken is not None
    assert broke is (size >= 100)
    assert payloads == ([b"first"] if broke else [b"first", b"x" * size, b"after"])


def test_broken_decoder_raises() -> None:
    """Whoever feeds a broken decoder is told why."""
    decoder = SSEDecoder(limit=10)
    assert decoder.feed(b"data: " + b"x" * 50) == []
    assert decoder.broken == "an event of more than 10 bytes"
    with pytest.raises(StreamMalformed, match="more than 10 bytes"):
        decoder.feed(b"\n\n")


@pytest.mark.parametrize(
    "data",
    [b": " + b"c" * 200, b": " + b"c" * 200 + b"\n\n", b"data: x\n" * 60, b"event: " + b"e" * 200 + b"\n"],
    ids=["unfinished comment", "comment", "many lines", "other field"],
)
def test_limit_holds_for_everything(data: bytes) -> None:
    """Nothing that is not finished grows without bound, whatever it is."""
    decoder = SSEDecoder(limit=100)
    assert decoder.feed(data) == []
    assert decoder.broken is not None


def test_pending_counts_the_unfinished_event() -> None:
    """Bytes of an event that has no end yet are counted, and no longer once it has."""
    decoder = SSEDecoder()
    decoder.feed(b"data: abc")
    assert decoder.pending == 9
    decoder.feed(b"\n")
    assert decoder.pending == 4
    decoder.feed(b"\n")
    assert decoder.pending == 0
