"""What a request accepts, refuses and computes; and what a policy refuses."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.errors import ConfigurationError
from lifecycle.events import VersionSpan
from lifecycle.policy import DEFAULT_POLICY, Policy
from lifecycle.request import (
    MULTIMODAL,
    RESERVED_EXTRA,
    RESERVED_SAMPLING,
    RolloutRequest,
    attempt_sampling_params,
    remaining_budget,
)
from lifecycle.snapshot import Snapshot


def test_the_least_one_can_say() -> None:
    """A prompt; everything else has a default, and the id is fresh."""
    one, two = RolloutRequest(prompt_ids=[1, 2]), RolloutRequest(text="hello")
    assert one.prompt_ids == (1, 2)
    assert len(one.id) == 32
    assert one.id != two.id
    assert one.group == one.id
    assert RolloutRequest(prompt_ids=[1], group_id="g").group == "g"


def test_it_is_frozen_and_keeps_a_copy_of_the_prompt() -> None:
    """Later changes of the list do not show."""
    ids = [1, 2]
    request = RolloutRequest(prompt_ids=ids)
    ids.append(3)
    assert request.prompt_ids == (1, 2)
    with pytest.raises(AttributeError):
        request.max_new_tokens = 3  # type: ignore[misc]
    kept = (1, 2)
    assert RolloutRequest(prompt_ids=kept).prompt_ids is kept


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt_ids": [1], "id": ""}, "id must be a non-empty string"),
        ({"prompt_ids": [1], "id": 7}, "id must be a non-empty string, not 7"),
        ({}, "exactly one of prompt_ids and text"),
        ({"prompt_ids": [1], "text": "x"}, "exactly one of prompt_ids and text"),
        ({"text": ""}, "text must not be empty"),
        ({"prompt_ids": []}, "prompt_ids must not be empty"),
        ({"prompt_ids": [1, -1]}, "whole numbers from 0"),
        ({"prompt_ids": [1, True]}, "whole numbers from 0"),
        ({"prompt_ids": [1.0]}, "whole numbers from 0"),
        ({"prompt_ids": [1], "max_new_tokens": -1}, "max_new_tokens must be a whole number from 0, not -1"),
        ({"prompt_ids": [1], "max_new_tokens": 1.5}, "max_new_tokens"),
        ({"prompt_ids": [1], "group_size": 0}, "group_size must be a whole number from 1, not 0"),
        ({"prompt_ids": [1], "index": -1}, "index must be a whole number from 0"),
        ({"prompt_ids": [1], "index": 2, "group_size": 2}, "index 2 must be below group_size 2"),
        ({"prompt_ids": [1], "sampling_params": [("a", 1)]}, "sampling_params must be a mapping, not list"),
        ({"prompt_ids": [1], "extra": "x"}, "extra must be a mapping, not str"),
        (
            {"prompt_ids": [1], "sampling_params": {"min_new_tokens": "5"}},
            r"\['min_new_tokens'\] must be a whole",
        ),
        (
            {"prompt_ids": [1], "sampling_params": {"min_new_tokens": -5}},
            r"\['min_new_tokens'\] must be a whole",
        ),
        ({"prompt_ids": [1], "sampling_params": {"stop_token_ids": 2}}, "must be a list of token ids, not 2"),
        ({"prompt_ids": [1], "sampling_params": {"stop_token_ids": ["x"]}}, "must be a list of token ids"),
        ({"prompt_ids": [1], "metadata": {"f": object()}}, "must be plain data"),
        ({"prompt_ids": [1], "extra": {"huge": 2**70}}, "must be plain data"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(fields: dict[str, Any], problem: str) -> None:
    """ConfigurationError, with the field and what would be right."""
    with pytest.raises(ConfigurationError, match=problem):
        RolloutRequest(**fields)


@pytest.mark.parametrize("key", RESERVED_SAMPLING)
def test_reserved_sampling_params_are_refused(key: str) -> None:
    """With what to do instead."""
    with pytest.raises(ConfigurationError, match=rf"sampling_params\['{key}'\] is not yours to set: "):
        RolloutRequest(prompt_ids=[1], sampling_params={key: 1})


@pytest.mark.parametrize("key", RESERVED_EXTRA)
def test_reserved_body_keys_are_refused(key: str) -> None:
    """The engine fills them in."""
    with pytest.raises(ConfigurationError, match=rf"extra\['{key}'\] is not yours to set: "):
        RolloutRequest(prompt_ids=[1], extra={key: 1})


@pytest.mark.parametrize("key", MULTIMODAL)
def test_multimodal_input_is_refused_for_now(key: str) -> None:
    """Clearly."""
    with pytest.raises(ConfigurationError, match="not supported yet"):
        RolloutRequest(prompt_ids=[1], extra={key: ["x"]})


def test_any_mapping_of_plain_data_will_do() -> None:
    """Nested lists, maps, bytes."""
    request = RolloutRequest(
        prompt_ids=[1], metadata=MappingProxyType({"deep": [{"x": b"1"}, None]}), extra={"lora_path": "a"}
    )
    assert request.metadata["deep"][0]["x"] == b"1"


@given(st.integers(0, 50), st.integers(0, 80), st.one_of(st.none(), st.integers(0, 60)))
def test_the_remaining_budget(budget: int, generated: int, least: int | None) -> None:
    """Never below zero; min_new_tokens shrinks with it, and only where it was given."""
    params = {} if least is None else {"min_new_tokens": least}
    request = RolloutRequest(prompt_ids=[1], max_new_tokens=budget, sampling_params=params)
    assert remaining_budget(request, generated) == max(0, budget - generated)
    sent = attempt_sampling_params(request, generated)
    assert sent["max_new_tokens"] == max(0, budget - generated)
    assert sent.get("min_new_tokens") == (None if least is None else max(0, least - generated))
    assert dict(request.sampling_params) == params


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"max_attempts": 0}, "max_attempts must be at least 1, not 0"),
        ({"backoff_initial": 0}, "backoff_initial"),
        ({"backoff_initial": 9.0, "backoff_max": 1.0}, "at most backoff_max"),
        ({"first_token_timeout": 0}, "first_token_timeout must be above 0 seconds or None, not 0"),
        ({"idle_timeout": -1}, "idle_timeout must be above 0"),
        ({"max_staleness": -1}, "max_staleness must be 0 or more"),
        ({"max_carries": 0}, "max_carries must be at least 1"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(fields: dict[str, Any], problem: str) -> None:
    """By name."""
    with pytest.raises(ConfigurationError, match=problem):
        Policy(**fields)


def test_a_minimum_that_is_null_is_none() -> None:
    """As SGLang has it."""
    request = RolloutRequest(prompt_ids=[1], sampling_params={"min_new_tokens": None, "stop_token_ids": None})
    assert attempt_sampling_params(request, 3)["min_new_tokens"] is None


@pytest.mark.parametrize(
    ("versions", "masked", "expected"),
    [
        (["1", "1", "2"], True, [0, 0, 1]),
        (["1", "1", "2"], False, [1, 1, 1]),
        (["1", "1", "1"], True, [1, 1, 1]),
        ([None, "1", "1"], True, [0, 1, 1]),
        (["1", "1", None], True, [1, 1, 1]),
        ([], True, []),
    ],
)
def test_the_loss_mask_of_a_policy(versions: list[str | None], masked: bool, expected: list[int]) -> None:
    """Tokens older than the sample's own last one are masked, where that is known and asked for."""
    spans = [VersionSpan(version, at, at + 1) for at, version in enumerate(versions) if version is not None]
    sample = Snapshot.from_prefix(RolloutRequest(prompt_ids=[1]), [7] * len(versions), None, spans)
    assert Policy(mask_off_policy=masked).loss_mask(sample) == expected


def test_the_default_policy_is_a_policy() -> None:
    """Switching time-outs off is allowed."""
    assert Policy() == DEFAULT_POLICY
    assert Policy(first_token_timeout=None, idle_timeout=None).idle_timeout is None
