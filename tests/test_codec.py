"""Snapshots as bytes: lossless, and never wrong."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle.codec import SCHEMA, decode_snapshot, decode_tail, encode_snapshot, encode_tail
from lifecycle.errors import SnapshotCorrupt, SnapshotTooNew
from lifecycle.events import VersionSpan
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Attempt, Channel
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition, FinishReason, Outcome, Reason, RolloutState
from lifecycle.testing.stores import rich_snapshot, same, snapshot
from tests.support.golden import DIGEST_BYTES as DIGEST
from tests.support.golden import HEADER_BYTES as HEADER
from tests.support.golden import following, full, plain, resealed, started

GOLDEN = Path(__file__).parent / "data" / "snapshots"

token_ids = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
plain_data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts | st.integers(0, 99), inner, max_size=3)
    ),
    max_leaves=6,
)
mappings = st.dictionaries(
    texts.filter(lambda key: key not in {"n", "stream", "text", "rid"}), plain_data, max_size=3
)


@st.composite
def token_pairs(draw: st.DrawFn) -> tuple[array[int], array[float]]:
    """As many ids as logprobs."""
    pairs = draw(st.lists(st.tuples(token_ids, st.floats()), max_size=20))
    return array("i", [pair[0] for pair in pairs]), array("d", [pair[1] for pair in pairs])


@st.composite
def version_spans(draw: st.DrawFn, tokens: int) -> tuple[VersionSpan, ...]:
    """Spans in order, perhaps with gaps."""
    cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=6)))
    return tuple(
        VersionSpan(draw(texts), start, end, draw(st.sampled_from(["label", "span", "given"])))
        for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Any snapshot."""
    size = draw(st.integers(1, 5))
    prompt = draw(st.none() | st.lists(token_ids, min_size=1, max_size=5).map(tuple))
    request = RolloutRequest(
        id=draw(texts.filter(bool)),
        prompt_ids=prompt,
        text=draw(texts.filter(bool)) if prompt is None else None,
        max_new_tokens=draw(st.integers(0, 2**40)),
        sampling_params=draw(mappings),
        group_id=draw(st.none() | texts),
        group_size=size,
        index=draw(st.integers(0, size - 1)),
        metadata=draw(mappings),
        routing_key=draw(st.none() | texts),
        extra=draw(mappings),
    )
    tokens, logprobs = draw(token_pairs())
    numbers, seconds = st.integers(0, 2**40), st.floats(0, 1e12)
    attempt = st.builds(Attempt, numbers, texts, numbers, numbers, seconds, st.none() | seconds)
    channel = st.builds(Channel, st.lists(st.tuples(numbers, st.binary()), max_size=2), st.booleans())
    return Snapshot(
        request=request,
        state=draw(st.sampled_from(RolloutState)),
        prompt_ids=draw(st.just(prompt) | st.lists(token_ids, min_size=1, max_size=5).map(tuple)),
        tokens=tokens,
        logprobs=logprobs,
        spans=draw(version_spans(len(tokens))),
        text=draw(st.none() | texts),
        attempt=draw(numbers),
        attempts=tuple(draw(st.lists(attempt, max_size=2))),
        channels=draw(st.dictionaries(texts, channel, max_size=2)),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        matched=draw(st.none() | texts | token_ids),
        reason=draw(st.none() | st.sampled_from(Reason)),
        detail=draw(st.none() | texts),
        outcome=draw(st.none() | st.sampled_from(Outcome)),
        disposition=draw(st.sampled_from(Disposition)),
        fruitless=draw(numbers),
        carries=draw(numbers),
        seq=draw(numbers),
        process=draw(st.none() | texts),
    )


@given(snapshots())
@settings(max_examples=40)
def test_a_snapshot_survives(value: Snapshot) -> None:
    """Whatever is in it comes back, logprobs to the bit."""
    assert same(decode_snapshot(encode_snapshot(value)), value)


@given(token_pairs(), st.integers(0, 2**40), st.none() | texts, st.sampled_from(RolloutState))
def test_a_tail_survives(pairs: Any, number: int, text: str | None, state: RolloutState) -> None:
    """Whatever is in it comes back, logprobs to the bit."""
    tokens, logprobs = pairs
    value = Tail(
        id="r",
        attempt=number,
        start=number,
        tokens=tokens,
        logprobs=logprobs,
        text=text,
        text_start=3,
        state=state,
    )
    again = decode_tail(encode_tail(value))
    assert again.logprobs.tobytes() == logprobs.tobytes()
    logprobs[:] = array("d", [0.0] * len(logprobs))
    again.logprobs[:] = logprobs
    assert again == value


@pytest.mark.parametrize("name", ["snapshot", "tail"])
def test_every_flipped_bit_is_found(name: str) -> None:
    """No single bit of a record can change without being noticed, and the id is named."""
    data = encode_snapshot(full()) if name == "snapshot" else encode_tail(following())
    decode = decode_snapshot if name == "snapshot" else decode_tail
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises(SnapshotCorrupt, match="'r1'"):
                decode(bytes(damaged), "r1")


def test_every_truncation_is_found() -> None:
    """A record that ends early, or goes on too long, is refused."""
    data = encode_snapshot(full())
    for length in range(len(data)):
        with pytest.raises(SnapshotCorrupt):
            decode_snapshot(data[:length])
    with pytest.raises(SnapshotCorrupt):
        decode_snapshot(data + b"\0")


def altered(value: Snapshot, **fields: Any) -> bytes:
    """An encoded snapshot with other fields in its payload, as a buggy writer would have left it."""
    data = encode_snapshot(value)
    packed = msgspec.msgpack.decode(data[HEADER:-DIGEST])
    packed.update(fields)
    return resealed(data, payload=msgspec.msgpack.encode(packed))


def test_the_header_is_as_documented() -> None:
    """Magic, schema, kind, zero, payload length, payload, blake2b-128: nothing else."""
    data = encode_snapshot(plain())
    assert resealed(data) == data


def test_a_newer_schema_is_refused_as_such() -> None:
    """A good record of a later version says that an upgrade is needed, and never gives a guess."""
    newer = resealed(encode_snapshot(plain()), schema=SCHEMA + 1, payload=b"something else")
    with pytest.raises(
        SnapshotTooNew, match=f"'r1' has schema {SCHEMA + 1}, this version reads up to {SCHEMA}"
    ):
        decode_snapshot(newer, "r1")


@pytest.mark.parametrize("header", [{"kind": 2}, {"kind": 0}, {"zero": 1}, {"schema": 0}, {"length": 1}])
def test_a_header_that_does_not_fit_is_refused(header: dict[str, int]) -> None:
    """The checksum alone does not make a record."""
    with pytest.raises(SnapshotCorrupt):
        decode_snapshot(resealed(encode_snapshot(plain()), **header))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"surprise": 1}, "unknown field"),
        ({"state": "asleep"}, "asleep"),
        ({"tokens": b"\0\0\0\0"}, "1 tokens with 0 logprobs"),
        ({"tokens": b"\0"}, "multiple"),
        ({"spans": [("1", 0, 5, "label")]}, "span"),
        ({"spans": [("1", -1, 0, "label")]}, "span"),
        ({"attempt": "many"}, "attempt"),
        ({"request": {"id": ""}}, "field"),
    ],
)
def test_a_payload_that_cannot_be_true_is_refused(fields: dict[str, Any], problem: str) -> None:
    """A record with a good checksum and impossible contents is corrupt, not half used."""
    with pytest.raises(SnapshotCorrupt, match=problem):
        decode_snapshot(altered(plain(), **fields))


def test_a_request_that_is_refused_today_is_corrupt() -> None:
    """The rules for requests hold for stored ones too."""
    packed = msgspec.msgpack.decode(encode_snapshot(plain())[HEADER:-DIGEST])["request"]
    with pytest.raises(SnapshotCorrupt, match="group_size"):
        decode_snapshot(altered(plain(), request={**packed, "group_size": 0}))


def test_a_tail_that_cannot_be_true_is_refused() -> None:
    """Likewise for tails."""
    data = encode_tail(following())
    packed = msgspec.msgpack.decode(data[HEADER:-DIGEST])
    for fields in ({"tokens": b""}, {"state": "asleep"}, {"surprise": 1}):
        payload = msgspec.msgpack.encode({**packed, **fields})
        with pytest.raises(SnapshotCorrupt):
            decode_tail(resealed(data, kind=2, payload=payload))


def test_big_endian_machines_read_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored integers are little-endian whatever the machine is; here the swapping is shown to undo itself."""
    monkeypatch.setattr("lifecycle.codec.sys.byteorder", "big")
    swapped = encode_snapshot(rich_snapshot())
    assert same(decode_snapshot(swapped), rich_snapshot())
    assert b"\x7f\xff\xff\xff" in swapped


@pytest.mark.parametrize("value", [full(), plain(), started()], ids=lambda value: value.id)
def test_golden_snapshots_load(value: Snapshot) -> None:
    """What schema 1 wrote is read for ever."""
    data = (GOLDEN / "v1" / f"{value.id.replace('/', '-')}.snapshot").read_bytes()
    assert same(decode_snapshot(data, value.id), value)


def test_the_golden_tail_loads() -> None:
    """What schema 1 wrote is read for ever."""
    assert decode_tail((GOLDEN / "v1" / "started.tail").read_bytes()) == following()


def test_schema_1_is_still_what_is_written() -> None:
    """Other bytes for the same snapshot would need a new schema number."""
    assert SCHEMA == 1
    assert encode_snapshot(full()) == (GOLDEN / "v1" / "prompt-7-3.snapshot").read_bytes()


def test_a_long_rollout_is_compact() -> None:
    """12 bytes a token, and little else."""
    assert len(encode_snapshot(snapshot(tokens=4096))) < 4096 * 12 + 1024


def test_no_pickle_anywhere() -> None:
    """A snapshot file cannot run code."""
    package = Path(__file__).parents[1] / "lifecycle"
    assert not [path for path in package.rglob("*.py") if "import pickle" in path.read_text()]


def test_an_unknown_logprob_stays_unknown() -> None:
    """NaN comes back as NaN."""
    value = Snapshot(
        request=RolloutRequest(id="r", text="x"), tokens=array("i", [1]), logprobs=array("d", [math.nan])
    )
    assert math.isnan(decode_snapshot(encode_snapshot(value)).logprobs[0])
