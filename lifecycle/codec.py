"""Snapshots as bytes: versioned, checksummed, lossless.

Binary form of one record (`Snapshot` or `Tail`), all integers little-endian:

    magic b"RLSN"  |  schema u16  |  kind u8 (1 snapshot, 2 tail)  |  0 u8  |  payload length u32
    payload: MessagePack map by field name; token ids as int32, logprobs as float64, both packed;
             `sampling_params`, `metadata` and `extra` as MessagePack knows them (a tuple comes back as a list)
    blake2b-128 over everything before it

Evolution rule: any change of a field's name, type or meaning raises `SCHEMA`. A reader reads its own schema and all
older ones (one decoder per schema, each upgrading to the next), and refuses newer ones with SnapshotTooNew; it never
guesses. Golden files of every schema stay in the tests and must load for ever.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from lifecycle.errors import ConfigurationError, SnapshotCorrupt, SnapshotTooNew
from lifecycle.events import VersionSpan
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Attempt, Channel
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition, FinishReason, Outcome, Reason, RolloutState

SCHEMA = 1
MAGIC = b"RLSN"
_HEADER = struct.Struct("<4sHBBI")
_DIGEST = 16
_KIND_SNAPSHOT = 1
_KIND_TAIL = 2


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Encode; `decode_snapshot` gives an equal snapshot back."""
    return _seal(_KIND_SNAPSHOT, _ENCODER.encode(_pack(snapshot)))


def decode_snapshot(data: bytes, rollout_id: str = "?") -> Snapshot:
    """Decode. Raises SnapshotCorrupt or SnapshotTooNew, naming `rollout_id`."""
    payload = _open(data, _KIND_SNAPSHOT, rollout_id)
    try:
        return _unpack(_SNAPSHOT_DECODER.decode(payload), rollout_id)
    except (msgspec.DecodeError, ConfigurationError, ValueError) as error:
        raise SnapshotCorrupt(rollout_id, str(error)) from error


def encode_tail(tail: Tail) -> bytes:
    """Encode a tail, with a checksum of its own."""
    packed = _PackedTail(
        id=tail.id,
        attempt=tail.attempt,
        start=tail.start,
        tokens=_little(tail.tokens),
        logprobs=_little(tail.logprobs),
        spans=_pack_spans(tail.spans),
        text=tail.text,
        text_start=tail.text_start,
        state=str(tail.state),
    )
    return _seal(_KIND_TAIL, _ENCODER.encode(packed))


def decode_tail(data: bytes, rollout_id: str = "?") -> Tail:
    """Decode. Raises SnapshotCorrupt or SnapshotTooNew, naming `rollout_id`."""
    payload = _open(data, _KIND_TAIL, rollout_id)
    try:
        packed = _TAIL_DECODER.decode(payload)
        tokens, logprobs = _arrays(packed.tokens, packed.logprobs)
        return Tail(
            id=packed.id,
            attempt=packed.attempt,
            start=packed.start,
            tokens=tokens,
            logprobs=logprobs,
            spans=_unpack_spans(packed.spans),
            text=packed.text,
            text_start=packed.text_start,
            state=RolloutState(packed.state),
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise SnapshotCorrupt(rollout_id, str(error)) from error


class _PackedRequest(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    prompt_ids: bytes | None
    text: str | None
    max_new_tokens: int
    sampling_params: dict[Any, Any]
    group_id: str | None
    group_size: int
    index: int
    metadata: dict[Any, Any]
    routing_key: str | None
    extra: dict[Any, Any]


_PackedSpans = list[tuple[str, int, int, str]]


class _PackedSnapshot(msgspec.Struct, forbid_unknown_fields=True):
    request: _PackedRequest
    state: str
    prompt_ids: bytes | None
    tokens: bytes
    logprobs: bytes
    spans: _PackedSpans
    text: str | None
    attempt: int
    attempts: list[Attempt]
    channels: dict[str, Channel]
    finish_reason: str | None
    matched: int | str | None
    reason: str | None
    detail: str | None
    outcome: str | None
    disposition: str
    fruitless: int
    carries: int
    seq: int
    process: str | None


class _PackedTail(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    attempt: int
    start: int
    tokens: bytes
    logprobs: bytes
    spans: _PackedSpans
    text: str | None
    text_start: int
    state: str


_ENCODER = msgspec.msgpack.Encoder()
_SNAPSHOT_DECODER = msgspec.msgpack.Decoder(_PackedSnapshot)
_TAIL_DECODER = msgspec.msgpack.Decoder(_PackedTail)


def _seal(kind: int, payload: bytes) -> bytes:
    header = _HEADER.pack(MAGIC, SCHEMA, kind, 0, len(payload))
    digest = blake2b(header, digest_size=_DIGEST)
    digest.update(payload)
    return b"".join((header, payload, digest.digest()))


def _open(data: bytes, kind: int, rollout_id: str) -> memoryview:
    """The payload, after every check that needs no decoding."""
    try:
        magic, schema, found_kind, zero, length = _HEADER.unpack_from(data)
    except struct.error as error:
        raise SnapshotCorrupt(rollout_id, f"{len(data)} bytes are too few for a header") from error
    if magic != MAGIC:
        raise SnapshotCorrupt(rollout_id, "it does not start like a snapshot")
    view = memoryview(data)
    body, digest = view[:-_DIGEST], view[-_DIGEST:]
    if blake2b(body, digest_size=_DIGEST).digest() != digest:
        raise SnapshotCorrupt(rollout_id, f"checksum does not match ({len(data)} bytes)")
    if schema > SCHEMA:
        raise SnapshotTooNew(rollout_id, schema, SCHEMA)
    if schema < 1 or found_kind != kind or zero != 0 or length != len(body) - _HEADER.size:
        raise SnapshotCorrupt(
            rollout_id, f"schema {schema}, kind {found_kind}, {length} bytes announced, {len(body)} found"
        )
    return body[_HEADER.size :]


def _little(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _array(code: str, data: bytes) -> array[Any]:
    values: array[Any] = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _arrays(tokens: bytes, logprobs: bytes) -> tuple[array[int], array[float]]:
    ids, values = _array("i", tokens), _array("d", logprobs)
    if len(ids) != len(values):
        raise ValueError(f"{len(ids)} tokens with {len(values)} logprobs")
    return ids, values


def _ids(ids: Sequence[int] | None) -> bytes | None:
    return None if ids is None else _little(array("i", ids))


def _pack_spans(spans: Iterable[VersionSpan]) -> _PackedSpans:
    return [(span.version, span.start, span.end, str(span.source)) for span in spans]


def _unpack_spans(spans: _PackedSpans) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(*span) for span in spans)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _pack(snapshot: Snapshot) -> _PackedSnapshot:
    request = snapshot.request
    same_prompt = snapshot.prompt_ids is request.prompt_ids
    return _PackedSnapshot(
        request=_PackedRequest(
            id=request.id,
            prompt_ids=_ids(request.prompt_ids),
            text=request.text,
            max_new_tokens=request.max_new_tokens,
            sampling_params=dict(request.sampling_params),
            group_id=request.group_id,
            group_size=request.group_size,
            index=request.index,
            metadata=dict(request.metadata),
            routing_key=request.routing_key,
            extra=dict(request.extra),
        ),
        state=str(snapshot.state),
        prompt_ids=None if same_prompt else _ids(snapshot.prompt_ids),
        tokens=_little(snapshot.tokens),
        logprobs=_little(snapshot.logprobs),
        spans=_pack_spans(snapshot.spans),
        text=snapshot.text,
        attempt=snapshot.attempt,
        attempts=list(snapshot.attempts),
        channels=dict(snapshot.channels),
        finish_reason=_text(snapshot.finish_reason),
        matched=snapshot.matched,
        reason=_text(snapshot.reason),
        detail=snapshot.detail,
        outcome=_text(snapshot.outcome),
        disposition=str(snapshot.disposition),
        fruitless=snapshot.fruitless,
        carries=snapshot.carries,
        seq=snapshot.seq,
        process=snapshot.process,
    )


def _unpack(packed: _PackedSnapshot, rollout_id: str) -> Snapshot:
    tokens, logprobs = _arrays(packed.tokens, packed.logprobs)
    sent = packed.request
    request = RolloutRequest(
        id=sent.id,
        prompt_ids=None if sent.prompt_ids is None else tuple(_array("i", sent.prompt_ids)),
        text=sent.text,
        max_new_tokens=sent.max_new_tokens,
        sampling_params=sent.sampling_params,
        group_id=sent.group_id,
        group_size=sent.group_size,
        index=sent.index,
        metadata=sent.metadata,
        routing_key=sent.routing_key,
        extra=sent.extra,
    )
    spans = _unpack_spans(packed.spans)
    if any(not 0 <= span.start <= span.end <= len(tokens) for span in spans):
        raise SnapshotCorrupt(rollout_id, f"a version span lies outside the {len(tokens)} tokens")
    prompt = request.prompt_ids if packed.prompt_ids is None else tuple(_array("i", packed.prompt_ids))
    return Snapshot(
        request=request,
        state=RolloutState(packed.state),
        prompt_ids=prompt,
        tokens=tokens,
        logprobs=logprobs,
        spans=spans,
        text=packed.text,
        attempt=packed.attempt,
        attempts=tuple(packed.attempts),
        channels=packed.channels,
        finish_reason=None if packed.finish_reason is None else FinishReason(packed.finish_reason),
        matched=packed.matched,
        reason=None if packed.reason is None else Reason(packed.reason),
        detail=packed.detail,
        outcome=None if packed.outcome is None else Outcome(packed.outcome),
        disposition=Disposition(packed.disposition),
        fruitless=packed.fruitless,
        carries=packed.carries,
        seq=packed.seq,
        process=packed.process,
    )
