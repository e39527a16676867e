"""The shapes of SGLang's `/generate` chunks, as far as they are read. Everything else is skipped undecoded.

Field names and shapes as seen on SGLang 0.5.23 and read in the sources of 0.4.6.post5 to 0.5.23; all of `meta_info`
is optional, because queue aborts of several versions leave most of it out. Fields stand in the order in which
0.5.23 sends them, which is the order in which the decoder looks for them.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.json import Decoder

Count = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Pair = tuple[float | None, TokenId, Any]
"""(logprob, token id, text): the logprob is null for NaN and infinities, the text is null unless asked for."""


class Finish(Struct, gc=False):
    """`finish_reason`: `stop`, `length` or `abort`, with what belongs to each."""

    type: str
    matched: Any = None
    message: Any = None
    status_code: Any = None


class MetaInfo(Struct, gc=False):
    """`meta_info` of a chunk: the counters, the label and the logprobs of the output."""

    id: Any = None
    finish_reason: Finish | None = None
    weight_version: str | int | None = None
    output_token_logprobs: list[Pair] | None = None
    output_token_logprobs_length: Count | None = None
    completion_tokens: Count | None = None


class Chunk(Struct, gc=False):
    """One chunk; a refused request has `error` and no `meta_info`."""

    meta_info: MetaInfo | None = None
    error: Any = None


class TextChunk(Chunk, gc=False):
    """One chunk whose text is wanted."""

    text: str | None = None


class TailMeta(MetaInfo, gc=False):
    """`meta_info` of a chunk whose earlier pairs were cut out; pairs with texts are not read this way."""

    output_token_logprobs: list[tuple[float | None, TokenId, None]] | None = None


class TailChunk(Chunk, gc=False):
    """A chunk whose earlier pairs were cut out."""

    meta_info: TailMeta | None = None


class TailTextChunk(TextChunk, gc=False):
    """The same with text, of which the earlier part was cut out, too."""

    meta_info: TailMeta | None = None


class RawMeta(Struct, gc=False):
    """`meta_info`, for the bytes of its list."""

    output_token_logprobs: Raw


class RawChunk(Struct, gc=False):
    """A chunk, for the bytes of its list."""

    meta_info: RawMeta


class Span(Struct, gc=False):
    """One entry of `weight_versions`: half-open output-token range (SGLang 0.5.19 and later)."""

    version: str | int
    start: Count
    end: Count


class TerminalMeta(Struct, gc=False):
    """What only the last chunk says."""

    prompt_tokens: Any = None
    cached_tokens: Any = None
    reasoning_tokens: Any = None
    num_retractions: Any = None
    dp_rank: Any = None
    e2e_latency: Any = None
    completion_tokens: Any = None
    weight_versions: Raw | UnsetType = UNSET


class Terminal(Struct, gc=False):
    """The last chunk, read a second time for what only it says."""

    meta_info: TerminalMeta


META_FIELDS = (
    "prompt_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "num_retractions",
    "dp_rank",
    "e2e_latency",
    "completion_tokens",
)
"""Numbers of the last chunk that travel in `StreamEnd.meta`."""

CHUNK = Decoder(Chunk)
TEXT_CHUNK = Decoder(TextChunk)
TAIL_CHUNK = Decoder(TailChunk)
TAIL_TEXT_CHUNK = Decoder(TailTextChunk)
RAW_CHUNK = Decoder(RawChunk)
TERMINAL = Decoder(Terminal)
SPANS = Decoder(list[Span] | None)
