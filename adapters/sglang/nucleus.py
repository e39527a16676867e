"""Kept token ids of top-p sampling, as servers patched for slime send them: ragged int32 arrays, ids and offsets.

Asked for by `sampling_params["custom_params"]["return_top_p_token_ids"]`. Each array is base64 or a JSON list; the
offsets are one more than the tokens they speak of: those of this chunk or, on the last one, all of the attempt
(slime, pull request 2272).
"""

from __future__ import annotations

import binascii
from array import array
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from msgspec import Struct, ValidationError, json

from lifecycle.events import Anomaly, ChannelData

NAME = "top_p_token_ids"
"""The channel: JSON rows, one list of kept ids per token."""


class NucleusMeta(Struct, gc=False):
    """The two arrays under either of their names."""

    top_p_token_ids: str | list[int] | None = None
    top_p_kept_token_ids: str | list[int] | None = None
    top_p_token_offsets: str | list[int] | None = None
    top_p_kept_token_offsets: str | list[int] | None = None


class NucleusChunk(Struct, gc=False):
    """A chunk, read for these arrays."""

    meta_info: NucleusMeta


CHUNKS = json.Decoder(NucleusChunk)


def wants_nucleus(sampling_params: Mapping[str, Any]) -> bool:
    """Whether a request with these sampling parameters asks for them."""
    custom = sampling_params.get("custom_params")
    return isinstance(custom, Mapping) and bool(custom.get("return_top_p_token_ids"))


def read_nucleus(payload: bytes, shown: int, count: int) -> ChannelData | Anomaly | None:
    """The rows of one chunk that took the attempt from `shown` to `count` tokens; None where it has none."""
    try:
        meta = CHUNKS.decode(payload).meta_info
        ids = _ints(meta.top_p_token_ids if meta.top_p_token_ids is not None else meta.top_p_kept_token_ids)
        offsets = _ints(
            meta.top_p_token_offsets
            if meta.top_p_token_offsets is not None
            else meta.top_p_kept_token_offsets
        )
    except (ValidationError, ValueError) as problem:
        return Anomaly("channel", f"{NAME}: {problem}")
    if ids is None and offsets is None:
        return None
    if ids is None or offsets is None:
        return Anomaly("channel", f"{NAME}: ids and offsets come together or not at all")
    rows, new = len(offsets) - 1, count - shown
    if rows not in (new, count) or offsets[0] != 0 or offsets[-1] != len(ids) or sorted(offsets) != offsets:
        return Anomaly(
            "channel",
            f"{NAME}: {len(offsets)} offsets up to {offsets[-1] if offsets else 'none'} over {len(ids)} ids "
            f"for {count} tokens of which {new} are new",
        )
    if not rows:
        return None
    table = [ids[start:end] for start, end in pairwise(offsets)]
    return ChannelData(NAME, json.encode(table), count - rows, complete=True)


def _ints(value: str | list[int] | None) -> list[int] | None:
    if not isinstance(value, str):
        return value
    data = binascii.a2b_base64(value, strict_mode=True)
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are no int32 array")
    return list(array("i", data))
