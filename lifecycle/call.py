"""One attempt as it is sent, and as it is named afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CallRef:
    """One attempt as the servers know it: `rid` is unique per attempt; `worker` is None where a router hides it."""

    rid: str
    rollout_id: str
    attempt: int
    worker: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt, ready to send.

    `input_ids` are prompt ids plus the tokens kept from earlier attempts; `sampling_params` already hold the
    remaining `max_new_tokens` (and `min_new_tokens`); `extra` is merged into the body beside them.
    """

    rid: str
    rollout_id: str
    attempt: int
    input_ids: Sequence[int]
    sampling_params: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    routing_key: str | None = None

    @property
    def ref(self) -> CallRef:
        """The names of this call."""
        return CallRef(self.rid, self.rollout_id, self.attempt)
