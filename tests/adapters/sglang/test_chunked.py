"""Chunked bodies: the same bytes out however the connection cuts them, the same as another parser's, bad ones refused."""

from __future__ import annotations

from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.sglang import chunked
from adapters.sglang.chunked import ChunkedBody, NotChunked

NEXT = b"HTTP/1.1 200 OK\r\n"
extensions = st.sampled_from([b"", b";a=b", b"; a", b"  "])
trailers = st.sampled_from([b"", b"x: 1\r\n", b"x: 1\r\ny: 2\r\n"])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """(what a body says, how it is sent)."""
    chunks = draw(st.lists(st.binary(min_size=1, max_size=300), max_size=8))
    sent = b"".join(
        b"%s%s\r\n%s\r\n"
        % (draw(st.sampled_from([b"%x", b"%X", b"00%x"])) % len(chunk), draw(extensions), chunk)
        for chunk in chunks
    )
    return b"".join(chunks), sent + b"0" + draw(extensions) + b"\r\n" + draw(trailers) + b"\r\n"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """The data cut at these places."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[begin:end] for begin, end in pairwise(places)]


def read(body: ChunkedBody, parts: list[bytes]) -> bytes:
    """What some pieces say together."""
    return b"".join(body.feed(part) for part in parts)


def by_h11(sent: bytes) -> bytes:
    """The same body, read by h11."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "h")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(NEXT + b"transfer-encoding: chunked\r\n\r\n" + sent)
    found = b""
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        assert not isinstance(event, type), event
        found += bytes(event.data) if isinstance(event, h11.Data) else b""
    return found


@given(bodies(), st.lists(st.integers(0, 5000), max_size=12), st.sampled_from([b"", NEXT]))
def test_the_same_however_it_is_cut(sent: tuple[bytes, bytes], cuts: list[int], behind: bytes) -> None:
    """Any cutting gives the body, its end, and what came behind the end."""
    said, raw = sent
    body = ChunkedBody()
    assert read(body, pieces(raw + behind, cuts)) == said
    assert body.complete
    # What came in a piece of its own after the end was never given to it.
    assert behind.startswith(body.rest)
    whole = ChunkedBody()
    assert whole.feed(raw + behind) == said
    assert whole.rest == behind


@given(bodies())
def test_the_same_as_another_parser(sent: tuple[bytes, bytes]) -> None:
    """h11 reads the same body."""
    said, raw = sent
    assert by_h11(raw) == said


@given(bodies(), st.data())
def test_a_body_that_is_cut_off_is_not_complete(sent: tuple[bytes, bytes], data: st.DataObject) -> None:
    """Every true beginning says a beginning of the body, and does not end."""
    said, raw = sent
    body = ChunkedBody()
    assert said.startswith(body.feed(raw[: data.draw(st.integers(0, len(raw) - 1))]))
    assert not body.complete


def test_byte_by_byte() -> None:
    """A piece of a chunk comes out at once."""
    body = ChunkedBody()
    found = [body.feed(bytes([byte])) for byte in b"2;x\r\nab\r\n0\r\nt: 1\r\n\r\n"]
    assert found == [b""] * 5 + [b"a", b"b"] + [b""] * 13
    assert body.complete


@pytest.mark.parametrize(
    "raw",
    [
        b"zz\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b"1_0\r\n",
        b" 1\r\na\r\n",
        b"\r\n",
        b"\n",
        b"1\na\n",
        b"1\r\nab\r\n",
        b"1\r\na\n\n",
        b"1\r\naX",
        b"1\r\na\rX",
        b"1\rX",
        b"1000000000000000\r\n",
        b"1;" + b"x" * chunked.LINE_LIMIT,
        b"0\r\n" + b"x: 1\r\n" * (chunked.LINE_LIMIT // 6 + 1),
        b"0\r\n" + b"x" * (chunked.LINE_LIMIT + 1),
    ],
    ids=lambda raw: repr(raw[:20]),
)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_is_no_chunked_body_is_refused(raw: bytes, one_by_one: bool) -> None:
    """Never read as something else, and never waited for without end."""
    parts = [bytes([byte]) for byte in raw] if one_by_one else [raw]
    with pytest.raises(NotChunked, match=r"chunk|trailer"):
        read(ChunkedBody(), parts)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=4))
def test_any_bytes_end_in_order(raw: bytes, cuts: list[int]) -> None:
    """Whatever comes: a body, a wait for more, or NotChunked; the same however it is cut."""
    outcomes = set()
    for parts in ([raw], pieces(raw, cuts)):
        body = ChunkedBody()
        try:
            read(body, parts)
        except NotChunked:
            outcomes.add("refused")
        else:
            outcomes.add("complete" if body.complete else "waits")
    assert len(outcomes) == 1
