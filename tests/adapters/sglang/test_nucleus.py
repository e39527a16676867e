from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from adapters.sglang.attempt import AttemptDecoder
from adapters.sglang.nucleus import NAME, read_nucleus, wants_nucleus
from lifecycle.call import Call
from lifecycle.events import Anomaly, ChannelData


def b64(values: list[int]) -> str:
    """An int32 array as a server writes it."""
    return base64.b64encode(struct.pack(f"<{len(values)}i", *values)).decode()


def payload(**meta: Any) -> bytes:
    """A chunk of this `meta_info`."""
    return json.dumps({"text": "", "meta_info": meta}).encode()


def rows(found: ChannelData | Anomaly | None) -> list[list[int]]:
    """The rows of a channel."""
    assert isinstance(found, ChannelData)
    assert found.name == NAME
    table: list[list[int]] = json.loads(found.data)
    return table


@pytest.mark.parametrize("write", [list, b64], ids=["list", "base64"])
@pytest.mark.parametrize("kept", ["", "kept_"], ids=["plain name", "kept name"])
def test_rows_of_a_chunk_and_rows_of_everything_are_told_apart(write: Any, kept: str) -> None:
    """As many rows as new tokens belong to this chunk, as many as all tokens to the attempt from its start."""
    names = (f"top_p_{kept}token_ids", f"top_p_{kept}token_offsets")
    chunk = payload(**dict(zip(names, (write([5, 6, 7]), write([0, 2, 3])), strict=True)))
    new = read_nucleus(chunk, shown=3, count=5)
    assert rows(new) == [[5, 6], [7]]
    assert isinstance(new, ChannelData)
    assert new.start == 3
    whole = read_nucleus(chunk, shown=2, count=2)
    assert isinstance(whole, ChannelData)
    assert whole.start == 0


def test_a_chunk_without_them_has_no_rows() -> None:
    """Neither an empty chunk nor an empty array is news."""
    assert read_nucleus(payload(), 0, 1) is None
    assert read_nucleus(payload(top_p_token_ids=[], top_p_token_offsets=[0]), 4, 4) is None


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"top_p_token_ids": [1]}, "come together or not at all"),
        ({"top_p_token_ids": [1], "top_p_token_offsets": [0, 1, 1, 1]}, "4 offsets up to 1 over 1 ids for 2"),
        ({"top_p_token_ids": [1], "top_p_token_offsets": [0, 2]}, "2 offsets up to 2 over 1 ids"),
        ({"top_p_token_ids": [1, 2], "top_p_token_offsets": [0, 3, 2]}, "3 offsets up to 2"),
        ({"top_p_token_ids": [], "top_p_token_offsets": []}, "0 offsets up to none"),
        ({"top_p_token_ids": "!!", "top_p_token_offsets": "AAAA"}, NAME),
        ({"top_p_token_ids": "AAAA", "top_p_token_offsets": "AAAA"}, "3 bytes are no int32 array"),
        ({"top_p_token_ids": {"a": 1}, "top_p_token_offsets": []}, NAME),
    ],
)
def test_what_cannot_be_true_is_an_anomaly(meta: dict[str, Any], words: str) -> None:
    """The stream goes on without the rows, and the log says why."""
    found = read_nucleus(payload(**meta), shown=1, count=2)
    assert isinstance(found, Anomaly)
    assert words in found.detail


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"custom_params": {"return_top_p_token_ids": True}}, True),
        ({"custom_params": {"return_top_p_token_ids": False}}, False),
        ({"custom_params": None}, False),
        ({}, False),
    ],
)
def test_they_are_read_where_they_were_asked_for(params: dict[str, Any], wanted: bool) -> None:
    """A request that does not ask costs no second look at its chunks."""
    assert wants_nucleus(params) is wanted
    decoder = AttemptDecoder(Call("r", "r", 1, [1], {"max_new_tokens": 4, **params}))
    chunk = {
        "text": "a",
        "meta_info": {
            "id": "r",
            "finish_reason": None,
            "prompt_tokens": 1,
            "completion_tokens": 1,
            "output_token_logprobs": [[-0.5, 9, None]],
            "top_p_token_ids": [9, 8],
            "top_p_token_offsets": [0, 2],
        },
    }
    events = decoder.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    assert any(isinstance(event, ChannelData) for event in events) is wanted
