"""What a client is to do, and what it must come back with."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` samples of `tokens` tokens each from the servers at `urls`; `together`: all begin at once."""

    urls: tuple[str, ...]
    streams: int
    tokens: int
    together: bool = True
    options: dict[str, str] = field(default_factory=dict)

    def body(self, rid: str) -> dict[str, object]:
        """The request of one stream."""
        return {
            "rid": rid,
            "input_ids": list(PROMPT),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": self.tokens},
            "stream": True,
            "return_logprob": True,
            "together": self.streams if self.together else 0,
        }


PROMPT = tuple(range(100, 116))
Result = tuple[Sequence[int], Sequence[float]]
"""Token ids and logprobs of one stream."""


def new_rid() -> str:
    """A fresh request id."""
    return f"{random.getrandbits(128):032x}"


def digest(results: Sequence[Result]) -> str:
    """One name for what all streams brought; equal only if all are equal."""
    names = {
        hashlib.sha256(array("i", tokens).tobytes() + array("d", logprobs).tobytes()).hexdigest()
        for tokens, logprobs in results
    }
    return ",".join(sorted(names))
