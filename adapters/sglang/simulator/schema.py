"""The body of ``/generate``: what a server of 0.5.22 or later accepts, and the words with which it refuses the rest.

Seen on SGLang 0.5.23: a body that breaks the schema is answered with HTTP 400 also when it asks for a stream;
a body that fits the schema but not the model (too long, bad ranges) becomes an error chunk inside a 200 stream.
Unknown keys are ignored at the top level and refused inside ``sampling_params``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from adapters.sglang.simulator.settings import ServerSettings
from adapters.sglang.simulator.text import VOCAB_SIZE, encode


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Every sampling parameter that 0.5.23 knows. Most change nothing here: the model has no distribution."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = None
    min_p: float | None = 0.0
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    n: int | None = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: Any = None
    beam_width: int | None = None
    watermark: Any = None
    choice: list[str] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, empty ones left out."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)


class GenerateBody(msgspec.Struct, kw_only=True, frozen=True):
    """The keys of a ``/generate`` body that the simulator acts on; all others are ignored, as SGLang does."""

    rid: str | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams | None = None
    stream: bool | None = False
    return_logprob: bool | None = False
    logprob_start_len: int | None = -1
    return_text_in_logprobs: bool | None = False
    return_prompt_token_ids: bool = False
    lora_path: str | None = None
    priority: int | None = None


class BadBody(ValueError):
    """The body breaks the schema: HTTP 400 with the JSON ``body``, before any stream."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.body = refusal(message)


class BadRequest(ValueError):
    """The body fits the schema but cannot be served: an error chunk, code 400, inside a 200 stream."""


_decoder = msgspec.json.Decoder(GenerateBody)


def parse_body(body: bytes | dict[str, Any]) -> GenerateBody:
    """Decode and check a body. Raises BadBody with the words for the client."""
    try:
        return _decoder.decode(body) if isinstance(body, bytes) else msgspec.convert(body, GenerateBody)
    except msgspec.MsgspecError as error:
        raise BadBody(str(error)) from None


def refusal(message: str) -> dict[str, Any]:
    """The JSON body of an HTTP 400.

    Seen on 0.5.23: two gates look at a body. The first answers with an error object; what is wrong inside
    ``sampling_params`` is found by the second, whose ``error`` is a bare string.
    """
    if "$.sampling_params" not in message:
        return {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
    if "unknown field" in message:
        known = ", ".join(f"`{name}`" for name in SamplingParams.__struct_fields__)
        message = f"unknown field {message.split('unknown field ')[1].split(' - ', maxsplit=1)[0]}, expected one of {known}"
    return {"error": message}


def resolve(body: GenerateBody, settings: ServerSettings) -> tuple[list[int], SamplingParams, int]:
    """Prompt ids, parameters and the token budget of a request. Raises BadRequest where SGLang has a ValueError."""
    prompt = _prompt(body)
    params = body.sampling_params or SamplingParams()
    budget = settings.max_new_tokens if params.max_new_tokens is None else params.max_new_tokens
    _check_params(params, budget)
    limit = settings.context_length
    if (body.logprob_start_len or 0) > len(prompt):
        raise BadRequest(
            f"logprob_start_len ({body.logprob_start_len}) is higher than the number of input tokens ({len(prompt)})."
        )
    if len(prompt) >= limit:
        raise BadRequest(
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({limit} tokens)."
        )
    if params.max_new_tokens is not None and len(prompt) + budget > limit:
        total = len(prompt) + budget
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested "
            f"a total of {total} tokens: {len(prompt)} tokens from the input messages and {budget} tokens for "
            "the completion. Please reduce the number of tokens in the input messages or the completion to fit "
            "within the limit."
        )
    # The scheduler clamps a budget that nobody asked for to what is left of the context.
    return prompt, params, min(budget, limit - len(prompt) - 1) if params.max_new_tokens is None else budget


def _prompt(body: GenerateBody) -> list[int]:
    if body.input_ids is None:
        if body.text is None:
            raise BadRequest("Either text, input_ids or input_embeds should be provided.")
        return encode(body.text)
    # A real 0.5.23 on a CPU dies of such an id, with every request it had; that is a fault of its own here (DEATH).
    if any(not 0 <= token < VOCAB_SIZE for token in body.input_ids):
        raise BadRequest(
            f"The input_ids {body.input_ids} contains values greater than the vocab size ({VOCAB_SIZE})."
        )
    return body.input_ids


def _check_params(params: SamplingParams, budget: int) -> None:
    if (params.n or 1) != 1:
        raise BadRequest("The simulator serves single requests only: n must be 1.")
    if budget < 0:
        raise BadRequest(f"max_new_tokens must be at least 0, got {budget}.")
    if not 0 <= (params.min_new_tokens or 0) <= budget:
        raise BadRequest(
            f"min_new_tokens must be in [0, max_new_tokens({budget})], got {params.min_new_tokens}."
        )
    if params.temperature is not None and params.temperature < 0:
        raise BadRequest(f"temperature must be non-negative, got {params.temperature}.")
    if params.top_p is not None and not 0 < params.top_p <= 1:
        raise BadRequest(f"top_p must be in (0, 1], got {params.top_p}.")
    if params.stream_interval is not None and params.stream_interval < 1:
        raise BadRequest(f"stream_interval must be at least 1, got {params.stream_interval}.")
