"""The snapshots that the golden files of schema 1 hold. Never change a value here: the files must load for ever."""

from __future__ import annotations

import math
from array import array
from hashlib import blake2b
from typing import Any

from lifecycle.events import VersionSpan
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Attempt, Channel
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition, FinishReason, Outcome, Reason, RolloutState

HEADER_BYTES = 12
DIGEST_BYTES = 16


def full() -> Snapshot:
    """Every field used."""
    return Snapshot(
        request=RolloutRequest(
            id="prompt-7/3",
            text="Once upon a time",
            max_new_tokens=64,
            sampling_params={"temperature": 0.7, "stop": ["\n\n"], "top_p": 0.95},
            group_id="prompt-7",
            group_size=4,
            index=3,
            metadata={"answer": 42, "nested": {"π": [1, None, True]}, "raw": b"\x00\xff", 7: "seven"},
            routing_key="node-7",
            extra={"lora_path": "adapters/a", "priority": 3},
        ),
        state=RolloutState.FAILED,
        prompt_ids=(1, 2, 3, 4),
        tokens=array("i", [7, 8, 0, 2**31 - 1]),
        logprobs=array("d", [-0.5, math.nan, -math.inf, -1e-300]),
        spans=(VersionSpan("7", 0, 2, "span"), VersionSpan("8", 2, 4, "label")),
        text="déjà vu ☃",
        attempt=2,
        attempts=(
            Attempt(
                1, "0f" * 16, 0, 2, 1.5, 2.5, 3.5, "preempt", "server_abort", None, "http://10.0.0.1:30000"
            ),
            Attempt(2, "1e" * 16, 2, 4, 4.5),
        ),
        channels={"routed_experts": Channel([(0, b"\x01\x02"), (2, b"")], complete=False)},
        finish_reason=FinishReason.STOP,
        matched=151645,
        reason=Reason.MALFORMED,
        detail="the server's words",
        outcome=Outcome.REJECTED,
        disposition=Disposition.CARRIED,
        fruitless=1,
        carries=2,
        seq=9,
        process="node-1-4711-deadbeef",
    )


def plain() -> Snapshot:
    """As submitted."""
    return Snapshot(request=RolloutRequest(id="plain", prompt_ids=(5, 6), max_new_tokens=8))


def started() -> Snapshot:
    """In flight, with tokens; a tail follows."""
    return Snapshot(
        request=RolloutRequest(id="started", prompt_ids=(5, 6), max_new_tokens=8),
        state=RolloutState.PARTIAL,
        tokens=array("i", [10, 11]),
        logprobs=array("d", [-0.25, -0.5]),
        spans=(VersionSpan("3", 0, 2, "label"),),
        text="ab",
        attempt=1,
    )


def following() -> Tail:
    """The tail of `started`."""
    return Tail(
        id="started",
        attempt=1,
        start=2,
        tokens=array("i", [12]),
        logprobs=array("d", [-0.75]),
        spans=(VersionSpan("3", 0, 3, "label"),),
        text="c",
        text_start=2,
    )


def resealed(data: bytes, **changes: Any) -> bytes:
    """A record with other header fields or another payload, and a checksum that fits."""
    payload = changes.pop("payload", data[HEADER_BYTES:-DIGEST_BYTES])
    schema, kind, zero = (
        changes.get(name, default) for name, default in (("schema", 1), ("kind", 1), ("zero", 0))
    )
    length = changes.get("length", len(payload))
    header = b"RLSN" + schema.to_bytes(2, "little") + bytes([kind, zero]) + length.to_bytes(4, "little")
    return header + payload + blake2b(header + payload, digest_size=DIGEST_BYTES).digest()
