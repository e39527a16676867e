"""Channels beyond logprobs."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from adapters.sglang.attempt import AttemptDecoder
from adapters.sglang.channels import asked_channels
from lifecycle.backend import Call
from lifecycle.events import ChannelData, EndKind
from tests.support.sglang_chunks import ABORTED, LENGTH, RID, STOP, Seen, body, chunk, event


def run(*payloads: bytes, prompt: int = 3, **extra: Any) -> Seen:
    """What an attempt with these body keys makes of a stream, chunk by chunk."""
    decoder = AttemptDecoder(Call(RID, "r", 0, list(range(prompt)), {}, extra or {"top_logprobs_num": 2}))
    return Seen([each for payload in payloads for each in decoder.feed(event(payload))])


def rows(channel: ChannelData) -> Any:
    """The rows of a list channel."""
    return msgspec.json.decode(channel.data)


def test_only_when_asked() -> None:
    """Without a key that asks for channels none is read."""
    payload = chunk([11], 1, finish=STOP, output_top_logprobs=[[[-0.1, 11, None]]])
    decoder = AttemptDecoder(Call(RID, "r", 0, [1], {}))
    assert Seen(decoder.feed(event(payload))).channels == []
    assert asked_channels({"return_routed_experts": False, "lora_path": "x"}) == set()


@pytest.mark.parametrize("cumulative", [False, True])
def test_list_channel(cumulative: bool) -> None:
    """Rows follow the tokens in both modes."""
    tops = [[[-0.1, 11, None]], [[-0.2, 12, None]], [[-0.3, 13, None]]]
    start = 0 if cumulative else 1
    seen = run(
        chunk([11], 1, output_top_logprobs=tops[:1]),
        chunk([11, 12, 13][start:], 3, finish=STOP, output_top_logprobs=tops[start:]),
    )
    assert [(each.name, each.start, each.complete) for each in seen.channels] == [
        ("output_top_logprobs", 0, True),
        ("output_top_logprobs", 1, True),
    ]
    assert [row for each in seen.channels for row in rows(each)] == tops
    assert seen.tokens == [11, 12, 13]


def test_rows_that_do_not_fit() -> None:
    """A channel whose rows fit nothing is left out and noted; the tokens stay."""
    seen = run(chunk([11, 12], 2, output_top_logprobs=[[], [], []]), chunk([13], 3, finish=STOP))
    assert seen.channels == []
    assert "3 rows for 2 tokens" in seen.anomalies[0].detail
    assert seen.end.kind is EndKind.FINISHED


@pytest.mark.parametrize("start_len", [0, 2])
def test_routed_experts(start_len: int) -> None:
    """The blob is decoded from base64, placed by the prompt, and complete if its rows divide evenly."""
    prompt, count, width = 3, 2, 4
    data = bytes(range((prompt + count - 1 - start_len) * width * 4))
    seen = run(
        chunk([11, 12], 2, finish=STOP, routed_experts=base64.b64encode(data).decode()),
        prompt=prompt,
        return_routed_experts=True,
        routed_experts_start_len=start_len,
    )
    assert seen.channels == [ChannelData("routed_experts", data, start_len - prompt, complete=True)]


def test_incomplete_blob() -> None:
    """A blob that does not divide into rows is not complete."""
    blob = base64.b64encode(b"12345").decode()
    seen = run(chunk([11], 1, finish=STOP, routed_experts=blob), return_routed_experts=True)
    assert [each.complete for each in seen.channels] == [False]


@pytest.mark.parametrize("blob", ["!!", "YQ", "é"])
def test_bad_base64(blob: str) -> None:
    """A blob that is no base64 is noted."""
    seen = run(chunk([11], 1, finish=STOP, routed_experts=blob), return_routed_experts=True)
    assert [each.kind for each in seen.anomalies] == ["channel"]
    assert seen.end.kind is EndKind.FINISHED


@pytest.mark.parametrize(("finish", "noted"), [(STOP, True), (ABORTED, False)])
def test_asked_for_and_not_sent(finish: dict[str, Any], noted: bool) -> None:
    """A channel that was asked for and never came is noted once the request is done; an abort may lack it."""
    extra = {"return_routed_experts": True, "top_logprobs_num": 1}
    seen = run(chunk([11], 1, output_top_logprobs=[[]]), chunk([12], 2, finish=finish), **extra)
    details = [each.detail for each in seen.anomalies if each.kind == "channel_missing"]
    assert details == (
        ["asked for and not sent: routed_experts (a router may drop the key)"] if noted else []
    )


def test_nothing_generated_lacks_nothing() -> None:
    """A request without tokens has no channels to miss."""
    assert run(chunk([], 0, finish=LENGTH)).anomalies == []


def test_odd_shape() -> None:
    """A channel of an unknown shape costs nothing but itself."""
    seen = run(chunk([11], 1, finish=STOP, routed_experts=[1, 2]), return_routed_experts=True)
    assert [each.kind for each in seen.anomalies] == ["channel"]
    assert seen.tokens == [11]


def test_before_the_end() -> None:
    """Channels come before the end of the stream and after the tokens they belong to."""
    payload = chunk([11], 1, finish=STOP, output_top_logprobs=[[]], routed_experts="")
    decoder = AttemptDecoder(Call(RID, "r", 0, [1], {}, {"top_logprobs_num": 1}))
    names = [type(each).__name__ for each in decoder.feed(body(payload))]
    assert names == ["TokenSlice", "ChannelData", "ChannelData", "StreamEnd"]
