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

ASKED_BY = {
    "top_logprobs_num": "output_top_logprobs",
    "token_ids_logprob": "output_token_ids_logprobs",
    "return_sampling_mask": "output_token_sampling_mask",
    "return_routed_experts": "routed_experts",
    "return_indexer_topk": "indexer_topk",
}
"""Keys of a request body that make a server send channels, and the channel that each asks for."""

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


def asked_channels(extra: Mapping[str, Any]) -> frozenset[str]:
    """The channels that a request with these body keys asks for."""
    return frozenset(channel for key, channel in ASKED_BY.items() if extra.get(key))


class ChannelReader:
    """Reads the channels of one attempt.

    `prompt_tokens` and `start_len` (`routed_experts_start_len`, absolute; honoured since 0.5.12) place the rows of
    the blobs: those cover the sequence from `start_len` up to its last but one token, and come whole, once, with the
    last chunk. With `nucleus` the kept ids of top-p sampling are read too. A channel of `asked` that never came is
    noted when the request has finished: sglang-router up to 0.3.2 drops body keys that it does not know.
    """

    def __init__(
        self,
        prompt_tokens: int,
        start_len: int = 0,
        *,
        asked: frozenset[str] = frozenset(),
        nucleus: bool = False,
    ) -> None:
        self.missing = asked
        self.prompt_tokens = prompt_tokens
        self.start_len = start_len
        self.nucleus = nucleus

    def read(
        self, payload: bytes, shown: int, count: int, *, ended: bool, finished: bool = False
    ) -> Sequence[ChannelData | Anomaly]:
        """The channels of one chunk that took the attempt from `shown` to `count` tokens.

        `ended` says that it is the last one, `finished` that it is so because the request is done.
        """
        found = self._found(payload, shown, count, ended=ended)
        self.missing -= {each.name for each in found if isinstance(each, ChannelData)}
        wrong = any(isinstance(each, Anomaly) for each in found)
        if finished and count and self.missing and not wrong:
            names = ", ".join(sorted(self.missing))
            found.append(
                Anomaly("channel_missing", f"asked for and not sent: {names} (a router may drop the key)")
            )
        return found

    def _found(self, payload: bytes, shown: int, count: int, *, ended: bool) -> list[ChannelData | Anomaly]:
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
