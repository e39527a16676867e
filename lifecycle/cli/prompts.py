"""The prompts file: JSON lines, checked whole before anything starts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lifecycle.errors import ConfigurationError
from lifecycle.request import RolloutRequest

FIELDS = "id, prompt or input_ids, sampling_params, max_new_tokens, metadata"


class PromptLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line as it is written; exactly one of `prompt` and `input_ids` is given."""

    id: str | int | None = None
    prompt: str | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] = msgspec.field(default_factory=dict)
    max_new_tokens: int | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and the group of samples that is made of it."""

    group_id: str
    requests: tuple[RolloutRequest, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the command line says of all prompts. `seed` gives each sample a `sampling_seed` of its own."""

    samples_per_prompt: int
    max_new_tokens: int
    seed: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(path: str | os.PathLike[str], sampling: Sampling) -> list[Prompt]:
    """Read and check every line. Raises ConfigurationError naming file, line number and field."""
    file = Path(path)
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _group(_decode(line), number, sampling)
        except ConfigurationError as error:
            raise ConfigurationError(f"{file}, line {number}: {error}") from None
        if prompt.group_id in seen:
            first = seen[prompt.group_id]
            raise ConfigurationError(
                f"{file}, line {number}: field `id`: {prompt.group_id!r} was used in line {first}"
            )
        seen[prompt.group_id] = number
        prompts.append(prompt)
    if not prompts:
        raise ConfigurationError(f"{file} holds no prompts")
    return prompts


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash over everything that decides what is generated, to tell whether a run goes on with the same prompts."""
    digest = hashlib.sha256()
    for prompt in prompts:
        first = prompt.requests[0]
        what = (
            prompt.group_id,
            first.text,
            first.prompt_ids,
            dict(first.sampling_params),
            first.max_new_tokens,
        )
        digest.update(msgspec.json.encode(what, order="deterministic"))
    return digest.hexdigest()[:32]


def _decode(line: bytes) -> PromptLine:
    try:
        return msgspec.json.decode(line, type=PromptLine)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        words = str(error)
        if "unknown field" in words:
            words += f" (known: {FIELDS})"
        raise ConfigurationError(words.replace("`$.", "field `")) from error


def _group(line: PromptLine, number: int, sampling: Sampling) -> Prompt:
    if (line.prompt is None) == (line.input_ids is None):
        given = "both" if line.prompt is not None else "neither"
        raise ConfigurationError(f"fields `prompt` and `input_ids`: give exactly one of them, not {given}")
    group_id = str(line.id) if line.id is not None else f"p{number}"
    count = sampling.samples_per_prompt
    limit = sampling.max_new_tokens if line.max_new_tokens is None else line.max_new_tokens
    requests = [
        RolloutRequest(
            id=f"{group_id}/{index}",
            prompt_ids=None if line.input_ids is None else tuple(line.input_ids),
            text=line.prompt,
            max_new_tokens=limit,
            sampling_params=_params(line, sampling, group_id, index),
            group_id=group_id,
            group_size=count,
            index=index,
            metadata=line.metadata,
        )
        for index in range(count)
    ]
    return Prompt(group_id, tuple(requests))


def _params(line: PromptLine, sampling: Sampling, group_id: str, index: int) -> dict[str, Any]:
    params = {**sampling.params, **line.sampling_params}
    if sampling.seed is not None and "sampling_seed" not in params:
        digest = hashlib.blake2b(f"{sampling.seed}:{group_id}:{index}".encode(), digest_size=4).digest()
        params["sampling_seed"] = int.from_bytes(digest, "little") & 0x7FFFFFFF
    return params
