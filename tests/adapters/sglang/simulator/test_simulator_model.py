"""The simulated model: a pure function of the prefix."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.sglang.simulator.model import TokenModel
from adapters.sglang.simulator.text import EOS_ID, VOCAB_SIZE, TextStream, decode, encode

ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


@given(prompt=ids, seed=st.integers(0, 2**40), cut=st.integers(0, 30))
def test_a_resume_continues_the_same_answer(prompt: list[int], seed: int, cut: int) -> None:
    """Continuing from any prefix of an answer gives the rest of it."""
    model = TokenModel(seed, eos_probability=0.05)
    whole = model.continuation(prompt, 30)
    kept = [sample.token for sample in whole[:cut]]
    assert model.continuation(prompt + kept, 30 - cut) == whole[cut:]
    assert model.first_difference(prompt, [sample.token for sample in whole]) is None


@given(prompt=ids, count=st.integers(1, 30))
def test_rolling_state_equals_the_state_of_the_whole(prompt: list[int], count: int) -> None:
    """Extending the state token by token is the same as starting from the whole prefix."""
    model = TokenModel(3)
    tokens = [sample.token for sample in model.continuation(prompt, count)]
    state = model.start(prompt)
    for token in tokens:
        state = model.extend(state, token)
    assert state == model.start(prompt + tokens)


def test_another_seed_prompt_sampling_seed_or_version_gives_another_answer() -> None:
    """Everything that may enter the function does."""
    model = TokenModel(1, version_dependent=True)
    base = model.continuation([1, 2], 20, version="a", sampling_seed=5)
    assert base != TokenModel(2, version_dependent=True).continuation(
        [1, 2], 20, version="a", sampling_seed=5
    )
    assert base != model.continuation([2, 1], 20, version="a", sampling_seed=5)
    assert base != model.continuation([1, 2], 20, version="a", sampling_seed=6)
    assert base != model.continuation([1, 2], 20, version="b", sampling_seed=5)


def test_the_version_is_ignored_unless_asked_for() -> None:
    """By default two weight versions say the same."""
    model = TokenModel(1)
    assert model.continuation([1], 20, version="a") == model.continuation([1], 20, version="b")


def test_forbidden_tokens_never_come() -> None:
    """What is forbidden is replaced, also when almost everything is."""
    model = TokenModel(1, eos_probability=1.0)
    assert {sample.token for sample in model.continuation([1], 5)} == {EOS_ID}
    only = encode("e")[0]
    forbidden = frozenset(range(VOCAB_SIZE)) - {only}
    assert [sample.token for sample in model.continuation([1], 5, forbidden=forbidden)] == [only] * 5


def test_eos_comes_about_as_often_as_asked() -> None:
    """The chance of the end-of-sequence id is the one that was set."""
    tokens = [sample.token for sample in TokenModel(4, eos_probability=0.1).continuation([1], 5000)]
    assert 350 < tokens.count(EOS_ID) < 650


def test_logprobs_are_negative_and_exact_in_json() -> None:
    """A logprob is at most zero and has six decimals, so that JSON keeps it exactly."""
    for sample in TokenModel(5).continuation([1], 500):
        assert -8.1 < sample.logprob < 0
        assert sample.logprob == round(sample.logprob, 6)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "versions", "where"),
    [(None, None, None, None), (7, None, None, 7), (None, 3, None, 3), (None, None, 0, 0)],
)
def test_first_difference(
    tokens: int | None, logprobs: int | None, versions: int | None, where: int | None
) -> None:
    """It finds the position of a wrong token, a wrong logprob, a wrong version."""
    model = TokenModel(6, version_dependent=True)
    samples = model.continuation([9], 10, version="v1")
    said = [sample.token for sample in samples]
    sure = [sample.logprob for sample in samples]
    labels = ["v1"] * 10
    if tokens is not None:
        said[tokens] ^= 1
    if logprobs is not None:
        sure[logprobs] -= 1
    if versions is not None:
        labels[versions] = "v2"
    assert model.first_difference([9], said, logprobs=sure, versions=labels) == where


def test_the_model_is_the_same_in_every_process() -> None:
    """No part of it depends on the hash seed of the interpreter."""
    code = (
        "from adapters.sglang.simulator.model import TokenModel;"
        "m = TokenModel(7, version_dependent=True);"
        "print([s.token for s in m.continuation([1, 2, 3], 12, version='x', sampling_seed=4)])"
    )
    model = TokenModel(7, version_dependent=True)
    here = [sample.token for sample in model.continuation([1, 2, 3], 12, version="x", sampling_seed=4)]
    for seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert answer.stdout.strip() == str(here)


@given(text=st.text())
def test_text_survives_the_tokenizer(text: str) -> None:
    """Encoding and decoding gives any text back."""
    assert decode(encode(text)) == text


@given(text=st.text(max_size=20), size=st.integers(1, 3))
def test_streamed_text_adds_up(text: str, size: int) -> None:
    """Deltas add up to the whole, and no delta ends in half a character."""
    stream, tokens = TextStream(), encode(text)
    deltas = [stream.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    assert "".join(deltas) + stream.push((), final=True) == text == stream.text


def test_half_a_character_appears_at_the_end_only() -> None:
    """An unfinished character is held back until the end, and is U+FFFD there."""
    stream = TextStream()
    assert stream.push(encode("\U0001f600")[:2]) == ""
    assert stream.push((), final=True) == "\ufffd"


def test_special_tokens_have_no_text() -> None:
    """Special tokens spell nothing; an id without a tokenizer entry is ``!`` in a stream, as seen on 0.5.23."""
    tokens = [EOS_ID, 300, *encode("a")]
    assert decode(tokens) == "a"
    assert TextStream().push(tokens) == "!a"
