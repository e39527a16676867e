"""The whole decoder under fire: any split of the same bytes tells the same story, and garbage only ends it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.sglang.answers import Answer
from adapters.sglang.attempt import AttemptDecoder
from lifecycle.backend import Call
from lifecycle.events import EndKind, StreamEnd
from tests.support.sglang_chunks import (
    ABORTED,
    LENGTH,
    QUEUE_ABORT,
    RID,
    STOP,
    Seen,
    body,
    chunk,
    encode,
    event,
)

CALL = Call(RID, "r", 0, [1, 2, 3], {})


def story(data: bytes, cuts: list[int], *, text: bool = False, limit: int = 1 << 20) -> Any:
    """Tokens, logprobs, labels and end of a body that arrives cut at `cuts`, then ends."""
    decoder = AttemptDecoder(CALL, text=text, event_limit=limit)
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    events = [each for start, stop in pairwise(at) for each in decoder.feed(data[start:stop])]
    if not decoder.ended:
        events.append(decoder.close(Answer.EOF))
    seen = Seen(events)
    assert decoder.have == len(seen.tokens)
    assert all(len(each.tokens) == len(each.logprobs) > 0 for each in seen.slices)
    logprobs = ["nan" if math.isnan(value) else value for value in seen.logprobs]
    return seen.tokens, logprobs, seen.labels, seen.end, seen.text


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """A body as some server might send it: either mode, merged steps, label changes, any end."""
    cumulative = draw(st.booleans())
    total = draw(st.integers(0, 12))
    tokens = draw(st.lists(st.integers(0, 200_000), min_size=total, max_size=total))
    logprobs = draw(st.lists(st.one_of(st.none(), st.floats(-20, 0)), min_size=total, max_size=total))
    steps = sorted(draw(st.sets(st.integers(0, total), max_size=total)) | {total})
    finish = draw(st.sampled_from([STOP, LENGTH, ABORTED, QUEUE_ABORT, None]))
    letters = draw(st.text(st.sampled_from('abé😀"\\]},'), min_size=total, max_size=total))
    payloads, have = [], 0
    for step in steps:
        start = 0 if cumulative else have
        entries = [[logprobs[n], tokens[n], None] for n in range(start, step)]
        last = step == total
        full_again = last and finish is QUEUE_ABORT
        payloads.append(
            chunk(
                None,
                step,
                finish=finish if last else None,
                version=draw(st.sampled_from(["7", "8", None])),
                text=letters[0 if full_again else start : step],
                output_token_logprobs=[[logprobs[n], tokens[n], None] for n in range(step)]
                if full_again
                else entries,
            )
        )
        have = step
    return body(*payloads, done=draw(st.booleans()))


@given(data=streams(), cuts=st.lists(st.integers(0, 5000), max_size=8), text=st.booleans())
def test_random_splits(data: bytes, cuts: list[int], text: bool) -> None:
    """Any split of a body ends in the same tokens, logprobs, labels, text and end as the body in one piece."""
    assert story(data, cuts, text=text) == story(data, [], text=text)


@settings(max_examples=40)
@given(data=streams())
def test_byte_by_byte(data: bytes) -> None:
    """Byte by byte it is the same, too."""
    assert story(data, list(range(len(data)))) == story(data, [])


@given(data=streams(), at=st.integers(0, 5000), cuts=st.lists(st.integers(0, 5000), max_size=4))
def test_cut_off(data: bytes, at: int, cuts: list[int]) -> None:
    """A body that breaks off anywhere is lost or ended, never rejected."""
    *_, end, _ = story(data[: at % (len(data) + 1)], cuts)
    assert end.kind in {EndKind.LOST, EndKind.FINISHED, EndKind.ENDED}


@given(
    data=streams(), place=st.integers(0, 5000), noise=st.binary(min_size=1, max_size=6), text=st.booleans()
)
def test_noise_in_a_good_stream(data: bytes, place: int, noise: bytes, text: bool) -> None:
    """Bytes overwritten anywhere end the stream somehow; nothing is raised."""
    at = place % len(data)
    *_, end, _ = story(data[:at] + noise + data[at + len(noise) :], [at], text=text)
    assert isinstance(end, StreamEnd)


@given(data=st.binary(max_size=200), framed=st.booleans())
def test_random_bytes(data: bytes, framed: bool) -> None:
    """Random bytes are rejected or lost, and say why."""
    *_, end, _ = story(event(data) if framed else data, [len(data) // 2], limit=100)
    assert end.kind in {EndKind.REJECTED, EndKind.LOST}
    assert end.detail or not framed


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 2**40), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                ["meta_info", "error", "finish_reason", "type", "completion_tokens", "message", "code"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@given(values=st.lists(JSON, min_size=1, max_size=3), meta=st.booleans())
def test_random_json(values: list[Any], meta: bool) -> None:
    """Well-formed JSON of any shape ends the stream somehow; nothing is raised."""
    payloads = [encode({"meta_info": value} if meta else value) for value in values]
    *_, end, _ = story(body(*payloads), [])
    assert isinstance(end, StreamEnd)


def test_oversized_event() -> None:
    """An event above the limit is malformed; what came before it counts."""
    data = body(chunk([11], 1), done=False) + b"data: " + b"x" * 2000
    tokens, *_, end, _ = story(data, [], limit=1000)
    assert tokens == [11]
    assert (end.kind, end.detail) == (EndKind.REJECTED, "an event of more than 1000 bytes")


@pytest.mark.parametrize(("detail", "words"), [(None, "14 bytes"), ("gone", "gone; 14 bytes")])
def test_unfinished_event_is_named(detail: str | None, words: str) -> None:
    """What was cut off at the end is counted in the detail."""
    decoder = AttemptDecoder(CALL)
    decoder.feed(b'data: {"text":')
    end = decoder.close(Answer.CUT, detail)
    assert end.detail == f"{words} of an unfinished event were dropped"
    assert decoder.feed(b"more") == []
