"""What a stream of ``/generate`` looks like."""

from __future__ import annotations

import itertools

import pytest

from tests.contract.reader import Subject

pytestmark = pytest.mark.contract

META_KEYS = {
    "id",
    "finish_reason",
    "prompt_tokens",
    "weight_version",
    "num_retractions",
    "input_token_logprobs",
    "output_token_logprobs",
    "output_token_logprobs_length",
    "reasoning_tokens",
    "completion_tokens",
    "cached_tokens",
    "cached_tokens_details",
    "dp_rank",
}
FIRST_KEYS = META_KEYS | {"response_sent_to_client_ts"}
LAST_KEYS = META_KEYS | {"weight_versions", "e2e_latency"}


def test_keys_of_first_middle_and_last_chunk(subject: Subject) -> None:
    """Every chunk has the same keys, the first a time stamp more, the last its spans and its latency."""
    stream = subject.complete("keys", 24)
    assert len(stream.chunks) >= 3
    assert all(set(chunk) == {"text", "output_ids", "meta_info"} for chunk in stream.chunks)
    first, *middle, last = [set(chunk["meta_info"]) for chunk in stream.chunks]
    assert first == FIRST_KEYS
    assert all(keys == META_KEYS for keys in middle)
    assert last == LAST_KEYS


def test_types_of_the_values(subject: Subject) -> None:
    """Counters are integers, logprobs are floats with an id and null, the finish reason is null until the end."""
    stream = subject.complete("types", 24)
    for chunk in stream.chunks:
        meta = chunk["meta_info"]
        assert isinstance(chunk["text"], str)
        assert all(type(token) is int for token in chunk["output_ids"])
        assert meta["id"] == subject.rid("types")
        for key in (
            "prompt_tokens",
            "num_retractions",
            "reasoning_tokens",
            "completion_tokens",
            "cached_tokens",
        ):
            assert type(meta[key]) is int, key
        assert meta["prompt_tokens"] == 5
        assert meta["input_token_logprobs"] == []
        assert meta["output_token_logprobs_length"] == meta["completion_tokens"]
        for logprob, token, text in meta["output_token_logprobs"]:
            assert type(logprob) is float
            assert logprob <= 0
            assert type(token) is int
            assert text is None
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in stream.chunks[:-1])
    assert stream.finish == {"type": "length", "length": 24}
    assert type(stream.meta["e2e_latency"]) is float
    assert stream.meta["weight_versions"] == [
        {"version": stream.meta["weight_version"], "start": 0, "end": 24}
    ]


def test_ids_text_and_logprobs_repeat_or_continue(subject: Subject) -> None:
    """A cumulative server repeats everything in each chunk, an incremental one sends only what is new."""
    stream = subject.complete("mode", 24)
    seen = 0
    for chunk in stream.chunks:
        count = chunk["meta_info"]["completion_tokens"]
        ids = [pair[1] for pair in chunk["meta_info"]["output_token_logprobs"]]
        assert chunk["output_ids"] == ids == stream.tokens[seen if subject.incremental else 0 : count]
        seen = count
    texts = [chunk["text"] for chunk in stream.chunks]
    whole = "".join(texts) if subject.incremental else texts[-1]
    if not subject.incremental:
        assert all(whole.startswith(text.rstrip("\ufffd")) for text in texts)
    assert whole == subject.post("/generate", {**subject.body("whole", 24), "stream": False}).json()["text"]
    assert stream.done


def test_content_type_and_done(subject: Subject) -> None:
    """A stream is 200 ``text/event-stream`` and ends with ``[DONE]``."""
    with subject.stream("done", 3) as stream:
        stream.read()
        assert stream.response.status_code == 200
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        assert stream.done


def test_without_logprobs_the_keys_are_missing(subject: Subject) -> None:
    """Logprob keys appear only where they were asked for."""
    body = {**subject.body("plain", 3), "return_logprob": False, "stream": False}
    meta = subject.post("/generate", body).json()["meta_info"]
    assert not [key for key in meta if "logprob" in key]


def test_a_request_without_a_stream(subject: Subject) -> None:
    """Without ``stream`` the answer is one JSON object with the tokens of the stream."""
    streamed = subject.complete("streamed", 12)
    answer = subject.post("/generate", {**subject.body("whole", 12), "stream": False})
    assert answer.status_code == 200
    assert answer.json()["output_ids"] == streamed.tokens
    keys = set(answer.json()["meta_info"])
    assert keys == LAST_KEYS | {"response_sent_to_client_ts"}


def test_greedy_answers_repeat_and_a_resume_continues_them(subject: Subject) -> None:
    """``prompt + first k tokens`` goes on with the tokens and logprobs of the uninterrupted answer."""
    whole = subject.complete("whole", 40)
    assert subject.complete("again", 40).tokens == whole.tokens
    prompt = [39, 68, 75, 75, 78]
    for kept in (1, 17, 39):
        rest = subject.complete(f"rest{kept}", 40 - kept, input_ids=prompt + whole.tokens[:kept])
        assert rest.tokens == whole.tokens[kept:]
        assert rest.logprobs == pytest.approx(whole.logprobs[kept:], abs=1e-4)


def test_no_tokens_asked_for(subject: Subject) -> None:
    """``max_new_tokens: 0`` is a success without output."""
    stream = subject.complete("none", 0)
    assert stream.finish == {"type": "length", "length": 0}
    assert stream.tokens == []
    assert stream.chunks[-1]["output_ids"] == []
    assert stream.meta["completion_tokens"] == 0
    assert stream.done


def test_one_token_asked_for(subject: Subject) -> None:
    """``max_new_tokens: 1`` is one chunk that is first and last."""
    stream = subject.complete("one", 1)
    assert stream.finish == {"type": "length", "length": 1}
    assert len(stream.tokens) == 1
    assert set(stream.meta) == LAST_KEYS | {"response_sent_to_client_ts"}


def test_stop_token(subject: Subject) -> None:
    """A stop token ends the answer, is named, and stays among the ids but not in the text."""
    whole = subject.complete("whole", 40)
    wanted = whole.tokens[20]
    first = whole.tokens.index(wanted)
    sampling = {"stop_token_ids": [wanted], "ignore_eos": False}
    stream = subject.complete("stop", 40, sampling=sampling)
    assert stream.finish == {"type": "stop", "matched": wanted}
    assert stream.tokens == whole.tokens[: first + 1]


def test_ignore_eos_ignores_stop_tokens_too(subject: Subject) -> None:
    """With ``ignore_eos`` the stop token ids do nothing either."""
    whole = subject.complete("whole", 20)
    stream = subject.complete("ignored", 20, sampling={"stop_token_ids": [whole.tokens[5]]})
    assert stream.tokens == whole.tokens


def test_stop_string(subject: Subject) -> None:
    """A stop string ends the answer and is cut off the text, while its tokens stay."""
    whole = subject.complete("whole", 40)
    texts = [subject.post("/v1/detokenize", {"tokens": [token]}).json()["text"] for token in whole.tokens]
    stop = next(text for text in texts if text.isalnum() and texts.index(text) >= 3)
    stream = subject.complete("stop", 40, sampling={"stop": stop})
    assert stream.finish == {"type": "stop", "matched": stop}
    assert stream.tokens == whole.tokens[: texts.index(stop) + 1]
    texts = [chunk["text"] for chunk in stream.chunks]
    assert stop not in ("".join(texts) if subject.incremental else texts[-1])


def test_text_prompt(subject: Subject) -> None:
    """A text prompt is tokenised by the server: "Hello" is the five ids of the fixed prompt."""
    body = subject.body("text", 8)
    del body["input_ids"]
    body["text"] = "Hello"
    body["stream"] = False
    assert subject.post("/generate", body).json()["output_ids"] == subject.complete("ids", 8).tokens


def test_stream_interval(subject: Subject) -> None:
    """``stream_interval`` brings the first token at once and then at least that many per chunk."""
    stream = subject.complete("interval", 25, sampling={"stream_interval": 8})
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in stream.chunks]
    assert counts[0] == 1 or counts[0] >= 8
    assert all(later - earlier >= 8 for earlier, later in itertools.pairwise(counts[:-1]))
    assert counts[-1] == 25
