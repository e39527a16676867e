"""Per-token channels beyond logprobs: top-k logprobs, sampling masks, routed experts.

They are read only for requests that ask for them, in a second look at the chunk, and are passed on as opaque bytes:
lists as JSON rows, one per token, by the same length rule as the logprobs; blobs as the bytes that were base64.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Raw, Struct, ValidationError
from msgspec.json import Decoder

from adapters.sglang.nucleus import read_nucleus
from lifecycle.events import Anomaly, ChannelData

ASKED_BY = (
    "top_logprobs_num",
    "token_ids_logprob",
    "return_sampling_mask",
    "return_routed_experts",
    "return_indexer_topk",
)
"""Keys of a request body that make a server send channels."""

INT32 = 4


class ChannelMeta(Struct, gc=False):
    """The channel fields of `meta_info`; absent unless asked for."""

    output_top_logprobs: list[Raw] | None = None
    output_token_ids_logprobs: list[Raw] | None = None
    output_token_sampling_mask: list[Raw] | None = None
    output_token_sampling_logprobs: list[Raw] | None = None
    routed_experts: str | None = None
    indexer_topk: str | None = None


class ChannelChunk(Struct, gc=False):
    """A chunk, read for its channels."""

    meta_info: ChannelMeta


LISTS = tuple(name for name in ChannelMeta.__struct_fields__ if name.startswith("output_"))
BLOBS = ("routed_experts", "indexer_topk")
CHANNELS = Decoder(ChannelChunk)


def wants_channels(extra: Mapping[str, Any]) -> bool:
    """Whether a request with these body keys will be answered with channels."""
    return any(extra.get(key) for key in ASKED_BY)


class ChannelReader:
    """Reads the channels of one attempt.

    `prompt_tokens` and `start_len` (`routed_experts_start_len`, absolute; honoured since 0.5.12) place the rows of
    the blobs: those cover the sequence from `start_len` up to its last but one token, and come whole, once, with the
    last chunk. With `nucleus` the kept ids of top-p sampling are read too.
    """

    def __init__(self, prompt_tokens: int, start_len: int = 0, *, nucleus: bool = False) -> None:
        self.prompt_tokens = prompt_tokens
        self.start_len = start_len
        self.nucleus = nucleus

    def read(self, payload: bytes, shown: int, count: int, *, ended: bool) -> Sequence[ChannelData | Anomaly]:
        """The channels of one chunk that took the attempt from `shown` to `count` tokens."""
        try:
            meta = CHANNELS.decode(payload).meta_info
        except ValidationError as problem:
            return [Anomaly("channel", str(problem))]
        found: list[ChannelData | Anomaly] = []
        if self.nucleus and (kept := read_nucleus(payload, shown, count)) is not None:
            found.append(kept)
        for name in LISTS:
            rows: list[Raw] | None = getattr(meta, name)
            if rows and count > shown:
                found.append(self._rows(name, rows, shown, count))
        if ended:
            found.extend(
                self._blob(name, blob, count) for name in BLOBS if (blob := getattr(meta, name)) is not None
            )
        return found

    def _rows(self, name: str, rows: list[Raw], shown: int, count: int) -> ChannelData | Anomaly:
        new = count - shown
        if len(rows) not in (count, new):
            return Anomaly("channel", f"{name}: {len(rows)} rows for {count} tokens of which {new} are new")
        return ChannelData(name, b"[" + b",".join(map(bytes, rows[-new:])) + b"]", shown, complete=True)

    def _blob(self, name: str, blob: str, count: int) -> ChannelData | Anomaly:
        try:
            data = binascii.a2b_base64(blob, strict_mode=True)
        except (binascii.Error, ValueError) as problem:
            return Anomaly("channel", f"{name}: not base64: {problem}")
        rows = self.prompt_tokens + count - 1 - self.start_len
        complete = rows > 0 and len(data) > 0 and len(data) % (rows * INT32) == 0
        return ChannelData(name, data, self.start_len - self.prompt_tokens, complete)
