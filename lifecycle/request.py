"""What the caller asks for. Frozen: budgets are computed from it, never taken out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import msgspec

from lifecycle.errors import ConfigurationError

RESERVED_SAMPLING = {
    "n": "one request is one sample: submit n requests with one group_id",
    "max_new_tokens": "give max_new_tokens= of the request: the remaining budget is computed at each attempt",
    "stream": "requests are always streamed",
}
RESERVED_EXTRA = {
    "rid": "each attempt gets an id of its own",
    "input_ids": "give prompt_ids=",
    "text": "give text=",
    "sampling_params": "give sampling_params=",
    "stream": "requests are always streamed",
    "return_logprob": "logprobs are always requested",
    "n": "one request is one sample",
}
LARGEST_ID = 2**31 - 1  # ids are kept as int32
MULTIMODAL = ("image_data", "audio_data", "video_data")
EMPTY: Mapping[str, Any] = MappingProxyType({})


def _nothing() -> Mapping[str, Any]:
    return EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One sample to generate.

    `id` is yours and stable over all attempts (a fresh hex id when left out). Exactly one of `prompt_ids` and
    `text` is given. `max_new_tokens` counts all generated tokens over all attempts. `group_id`, `group_size` and
    `index` place it among the samples of one prompt (a group of its own when left out). `metadata` travels along
    untouched; `extra` is merged into the request body (`lora_path`, `priority`, …); `routing_key` asks a router for
    affinity. Raises ConfigurationError, naming the field, for anything that cannot be sent.
    """

    id: str = field(default_factory=lambda: uuid4().hex)
    prompt_ids: Sequence[int] | None = None
    text: str | None = None
    max_new_tokens: int = 1024
    sampling_params: Mapping[str, Any] = field(default_factory=_nothing)
    group_id: str | None = None
    group_size: int = 1
    index: int = 0
    metadata: Mapping[str, Any] = field(default_factory=_nothing)
    routing_key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=_nothing)

    def __post_init__(self) -> None:
        """Check every field and freeze the sequences."""
        if not self.id or not isinstance(self.id, str):
            raise ConfigurationError(f"id must be a non-empty string, not {self.id!r}")
        self._check_prompt()
        _check_count("max_new_tokens", self.max_new_tokens, 0)
        _check_count("group_size", self.group_size, 1)
        _check_count("index", self.index, 0)
        if self.index >= self.group_size:
            raise ConfigurationError(f"index {self.index} must be below group_size {self.group_size}")
        _check_keys("sampling_params", self.sampling_params, RESERVED_SAMPLING)
        _check_sampling(self.sampling_params)
        _check_keys("extra", self.extra, RESERVED_EXTRA)
        for name in MULTIMODAL:
            if name in self.extra:
                raise ConfigurationError(
                    f"extra[{name!r}]: image, audio and video input is not supported yet"
                )

        try:
            msgspec.msgpack.encode((dict(self.sampling_params), dict(self.metadata), dict(self.extra)))
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"request {self.id!r}: sampling_params, metadata and extra must be plain data "
                f"(numbers, text, bytes, lists, maps): {error}"
            ) from error

    def _check_prompt(self) -> None:
        if (self.prompt_ids is None) == (self.text is None):
            raise ConfigurationError(f"request {self.id!r}: give exactly one of prompt_ids and text")
        if self.prompt_ids is None:
            if not self.text:
                raise ConfigurationError(f"request {self.id!r}: text must not be empty")
            return
        ids = self.prompt_ids if isinstance(self.prompt_ids, tuple) else tuple(self.prompt_ids)
        if not ids:
            raise ConfigurationError(f"request {self.id!r}: prompt_ids must not be empty")
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > LARGEST_ID:
            raise ConfigurationError(
                f"request {self.id!r}: prompt_ids must be token ids, whole numbers from 0 to {LARGEST_ID}"
            )
        object.__setattr__(self, "prompt_ids", ids)

    @property
    def group(self) -> str:
        """The group it belongs to: `group_id`, or its own id."""
        return self.group_id if self.group_id is not None else self.id


def remaining_budget(request: RolloutRequest, generated: int) -> int:
    """How many tokens may still be generated after `generated` of them."""
    return max(0, request.max_new_tokens - generated)


def attempt_sampling_params(request: RolloutRequest, generated: int) -> dict[str, Any]:
    """The sampling parameters of an attempt that goes on after `generated` tokens.

    `max_new_tokens` is the remaining budget and `min_new_tokens` shrinks likewise, because SGLang counts both from
    the start of the request (sampling/penaltylib, 0.5.23).
    """
    params: dict[str, Any] = dict(request.sampling_params)
    params["max_new_tokens"] = remaining_budget(request, generated)
    if params.get("min_new_tokens") is not None:
        params["min_new_tokens"] = max(0, params["min_new_tokens"] - generated)
    return params


def _check_count(name: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigurationError(f"{name} must be a whole number from {least}, not {value!r}")


def _check_sampling(params: Mapping[str, Any]) -> None:
    """Look at what we compute with ourselves; the rest is the server's to judge."""
    least, stops = params.get("min_new_tokens"), params.get("stop_token_ids")
    if least is not None:
        _check_count("sampling_params['min_new_tokens']", least, 0)
    if stops is not None and not (
        isinstance(stops, list | tuple | set | frozenset) and all(type(token) is int for token in stops)
    ):
        raise ConfigurationError(
            f"sampling_params['stop_token_ids'] must be a list of token ids, not {stops!r}"
        )


def _check_keys(name: str, mapping: Mapping[str, Any], reserved: Mapping[str, str]) -> None:
    if not isinstance(mapping, Mapping):
        raise ConfigurationError(f"{name} must be a mapping, not {type(mapping).__name__}")
    for key, instead in reserved.items():
        if key in mapping:
            raise ConfigurationError(f"{name}[{key!r}] is not yours to set: {instead}")
