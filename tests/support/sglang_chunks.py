"""SGLang chunks for tests, in the shapes of the wire reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from adapters.sglang.wire import WireDecoder
from lifecycle.events import Anomaly, ChannelData, StreamEnd, StreamEvent, TokenSlice

RID = "0123456789abcdef0123456789abcdef"
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
QUEUE_ABORT = {"type": "abort", "message": "Abort in waiting queue"}
LENGTH = {"type": "length", "length": 4}
STOP = {"type": "stop", "matched": 2}


def pairs(*tokens: int, logprob: float | None = -0.5) -> list[list[Any]]:
    """Logprob entries as the server writes them."""
    return [[logprob, token, None] for token in tokens]


def chunk(
    tokens: Sequence[int] | None = (),
    count: int | None = None,
    *,
    finish: dict[str, Any] | None = None,
    version: str | None = "7",
    text: str = "",
    **meta: Any,
) -> bytes:
    """One payload: `tokens` in its logprob list (None: no list), `count` as completion_tokens (None: left out)."""
    info: dict[str, Any] = {"id": RID, "finish_reason": finish, "prompt_tokens": 5}
    if version is not None:
        info["weight_version"] = version
    if tokens is not None:
        info["output_token_logprobs"] = pairs(*tokens)
    if count is not None:
        info["completion_tokens"] = count
    info.update(meta)
    return encode({"text": text, "output_ids": list(tokens or ()), "meta_info": info})


def encode(value: Any) -> bytes:
    """JSON as orjson writes it: no spaces, UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def event(payload: bytes) -> bytes:
    """A payload as one server-sent event."""
    return b"data: " + payload + b"\n\n"


def body(*payloads: bytes, done: bool = True) -> bytes:
    """A whole response body."""
    return b"".join(map(event, payloads)) + (event(b"[DONE]") if done else b"")


class Seen:
    """Everything that came out of a decoder, sorted by kind."""

    def __init__(self, events: Sequence[StreamEvent]) -> None:
        self.events = list(events)
        self.slices = [each for each in events if isinstance(each, TokenSlice)]
        self.anomalies = [each for each in events if isinstance(each, Anomaly)]
        self.channels = [each for each in events if isinstance(each, ChannelData)]
        self.ends = [each for each in events if isinstance(each, StreamEnd)]
        self.tokens = [token for each in self.slices for token in each.tokens]
        self.logprobs = [logprob for each in self.slices for logprob in each.logprobs]
        self.labels = [each.version for each in self.slices for _ in each.tokens]
        self.text = "".join(each.text or "" for each in self.slices)

    @property
    def end(self) -> StreamEnd:
        """The one end; it must be the last event."""
        assert len(self.ends) == 1
        assert self.events[-1] is self.ends[0]
        return self.ends[0]


def decode(*reads: Sequence[bytes], text: bool = False) -> Seen:
    """What a decoder makes of `reads`, each the payloads of one socket read."""
    decoder = WireDecoder(RID, text=text)
    return Seen([each for payloads in reads for each in decoder.read(payloads)])
