"""What decoding costs, in operations: counts do not flake, and a lost shortcut shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from adapters.sglang import wire
from adapters.sglang.attempt import AttemptDecoder
from lifecycle.backend import Call
from tests.support.sglang_chunks import LENGTH, RID, Seen, body, chunk, event

TOKENS = 400


class Counting:
    """A decoder that counts its calls and the bytes they were given."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.calls = 0
        self.bytes = 0

    def decode(self, payload: bytes) -> Any:
        """Decode and count."""
        self.calls += 1
        self.bytes += len(payload)
        return self._decoder.decode(payload)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    """Counts decodings of whole chunks."""
    counting = Counting(wire.CHUNK)
    monkeypatch.setattr(wire, "CHUNK", counting)
    return counting


@pytest.fixture
def tails(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    """Counts decodings of chunks whose repeated part was cut out."""
    counting = Counting(wire.TAIL_CHUNK)
    monkeypatch.setattr(wire, "TAIL_CHUNK", counting)
    return counting


def payloads(*, cumulative: bool) -> list[bytes]:
    """A stream of one token a chunk."""
    return [
        chunk(range(0 if cumulative else n - 1, n), n, finish=LENGTH if n == TOKENS else None)
        for n in range(1, TOKENS + 1)
    ]


def run(decoder: AttemptDecoder, stream: list[bytes], per_read: int) -> list[list[Any]]:
    """The batches of a stream of which each read brings so many chunks."""
    reads = [b"".join(map(event, stream[at : at + per_read])) for at in range(0, len(stream), per_read)]
    return [decoder.feed(read) for read in reads]


def attempt() -> AttemptDecoder:
    """One attempt."""
    return AttemptDecoder(Call(RID, "r", 0, [1], {}))


@pytest.mark.parametrize("per_read", [1, 8])
def test_incremental(whole: Counting, tails: Counting, per_read: int) -> None:
    """Every chunk of an incremental stream is decoded once, and each read makes one slice."""
    batches = run(attempt(), payloads(cumulative=False), per_read)
    assert (whole.calls, tails.calls) == (TOKENS, 0)
    assert all(len(Seen(batch).slices) == 1 for batch in batches)


def test_cumulative(whole: Counting, tails: Counting) -> None:
    """Of a cumulative stream the first three chunks are decoded whole; after that only what is new."""
    batches = run(attempt(), payloads(cumulative=True), 1)
    assert [token for batch in batches for token in Seen(batch).tokens] == list(range(TOKENS))
    assert whole.calls == 3
    assert tails.calls == TOKENS - 3
    assert tails.bytes < 300 * TOKENS  # linear: the whole chunks are 2.2 MB


def test_cumulative_overtaken(whole: Counting, tails: Counting) -> None:
    """Chunks that a newer one in the same read overtakes are never decoded."""
    decoder = attempt()
    run(decoder, payloads(cumulative=True), 8)
    reads = TOKENS // 8
    assert whole.calls + tails.calls <= reads + 8 + 2
    assert decoder.skipped >= TOKENS - reads - 8 - 2


def test_one_slice_for_a_whole_body() -> None:
    """A body that comes in one read is one slice."""
    assert len(Seen(attempt().feed(body(*payloads(cumulative=False)))).slices) == 1
