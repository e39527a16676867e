"""What tests of stores are made of: snapshots, tails, a clock, and how to compare."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lifecycle.errors import SnapshotError
from lifecycle.events import VersionSpan
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Attempt, Channel
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition, FinishReason, Reason, RolloutState
from lifecycle.stores.protocol import Claim

TTL = 30.0
OWNER, OTHER = "trainer-a", "trainer-b"


class ManualClock:
    """Wall-clock seconds that move when told to."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def request(rollout_id: str = "r1", **fields: Any) -> RolloutRequest:
    """A request with room for many tokens."""
    return RolloutRequest(id=rollout_id, prompt_ids=(1, 2, 3), max_new_tokens=100_000, **fields)


def snapshot(rollout_id: str = "r1", tokens: int = 0, *, first: int = 0, **fields: Any) -> Snapshot:
    """A snapshot with `tokens` tokens `first, first + 1, …`; aborted in attempt 1 if there are any, else pending."""
    fields.setdefault("state", RolloutState.ABORTED if tokens else RolloutState.PENDING)
    fields.setdefault("attempt", 1 if tokens else 0)
    return Snapshot(
        request=request(rollout_id),
        tokens=array("i", range(first, first + tokens)),
        logprobs=array("d", [-token / 7 for token in range(first, first + tokens)]),
        **fields,
    )


def tail(rollout_id: str = "r1", start: int = 0, count: int = 1, **fields: Any) -> Tail:
    """A tail that goes on where `snapshot` of `start` tokens ends."""
    fields.setdefault("attempt", 1)
    return Tail(
        id=rollout_id,
        start=start,
        tokens=array("i", range(start, start + count)),
        logprobs=array("d", [-token / 7 for token in range(start, start + count)]),
        **fields,
    )


def rich_snapshot(rollout_id: str = "rich") -> Snapshot:
    """A snapshot in which every field is used."""
    return Snapshot(
        request=request(
            rollout_id,
            sampling_params={"temperature": 0.7, "stop": ["\n\n"]},
            group_id="g",
            group_size=4,
            index=2,
            metadata={"answer": 42, "nested": {"π": [1, None, True]}, "raw": b"\x00\xff"},
            routing_key="node-7",
            extra={"lora_path": "adapters/a"},
        ),
        state=RolloutState.COMPLETED,
        prompt_ids=(1, 2, 3, 4),
        tokens=array("i", [7, 8, 2**31 - 1]),
        logprobs=array("d", [-0.5, math.nan, -math.inf]),
        spans=(VersionSpan("7", 0, 2, "span"), VersionSpan("8", 2, 3, "label")),
        text="déjà vu ☃",
        attempt=3,
        attempts=(Attempt(1, "ab" * 16, 0, 2, 1.5, 2.5, 3.5, "preempt", "server_abort", None, "http://w"),),
        channels={"routed_experts": Channel([(0, b"\x01\x02"), (2, b"")], complete=False)},
        finish_reason=FinishReason.STOP,
        matched="</s>",
        reason=Reason.STOP,
        detail="the server's words",
        disposition=Disposition.CARRIED,
        fruitless=1,
        carries=2,
        seq=9,
        process="host-1-abc",
    )


@contextmanager
def refused(kind: type[Exception] = SnapshotError) -> Iterator[None]:
    """The block must raise `kind`."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def ids(claim: Claim) -> list[str]:
    """The ids of a claim, sorted; it must have brought nothing unreadable."""
    assert not claim.unreadable, claim.unreadable
    return sorted(claimed.snapshot.id for claimed in claim.claimed)


def same(one: Snapshot, other: Snapshot) -> bool:
    """Equal in every field, logprobs to the bit (NaN equals itself)."""
    return _key(one) == _key(other)


def _key(value: Snapshot) -> list[Any]:
    plain = {name: getattr(value, name) for name in Snapshot.__dataclass_fields__}
    logprobs = plain.pop("logprobs")
    return [plain, logprobs.tobytes()]
