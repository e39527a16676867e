"""What a simulated server is started with; the defaults are those of a small SGLang server on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Mode = Literal["cumulative", "incremental"]
PauseMode = Literal["abort", "in_place", "retract"]
MODES: tuple[str, ...] = get_args(Mode)
PAUSE_MODES: tuple[str, ...] = get_args(PauseMode)

SGLANG_VERSION = "0.5.23"
"""The version whose wire format the simulator speaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one simulated server. Every field has SGLang's meaning where SGLang has such a setting."""

    mode: Mode = "cumulative"
    """Chunks repeat everything so far, or (``--incremental-streaming-output``) only what is new."""
    seed: int = 0
    """Two servers with one seed are replicas of one model."""
    eos_probability: float = 0.0
    """Chance of an end-of-sequence token at each position."""
    weight_version: str = "default"
    version_dependent: bool = False
    """Let the weight version change the tokens, so that spans can be checked token by token."""
    context_length: int = 32768
    max_running_requests: int = 256
    max_queued_requests: int | None = None
    """More waiting requests than this are ended with a 503 abort chunk; None: no limit."""
    max_total_tokens: int | None = None
    """Size of the KV cache in tokens: beyond it the newest running request is retracted; None: no limit."""
    max_new_tokens: int = 128
    """For requests that do not say."""
    stream_interval: int = 1
    label_lag: int = 1
    """By how many chunks of a stream the label ``weight_version`` lags behind an update (seen: 1)."""
    cache_page: int = 1
    """Granularity of the simulated prefix cache, in tokens."""
    api_key: str | None = None
    model_path: str = "simulated-llama"
    tokens_per_second: float = 0.0
    """Tokens per second and stream; 0 is as fast as possible. Used by the server, not by the brain."""
    late_abort_delay: float = 2.0
    """Seconds after the end of a stream at which its rid is aborted once more, whoever has it by then. Used by the
    server; seen on 0.5.23, where it is the back-up for clients that leave: a rid used again at once is cut down."""
    keep_history: bool = False
    """Keep every ended request for inspection; for tests."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        for name in ("context_length", "max_running_requests", "stream_interval", "cache_page"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_new_tokens", "label_lag", "tokens_per_second"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def incremental(self) -> bool:
        """Whether chunks carry deltas."""
        return self.mode == "incremental"
