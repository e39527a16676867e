"""What the caller wants done, as one small frozen object: the engine has mechanisms, the caller has policies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from lifecycle.errors import ConfigurationError

if TYPE_CHECKING:
    from lifecycle.snapshot import Snapshot


class OnAbort(StrEnum):
    """What becomes of the prefix when a rollout is brought to rest by an abort."""

    KEEP = "keep"  # keep the tokens; a resume goes on from them
    RESTART = "restart"  # keep the rollout, drop its tokens at the resume
    DISCARD = "discard"  # give the rollout up


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How rollouts are treated; one per engine, or one per `submit`.

    `max_attempts` counts only consecutive attempts that brought no token for a reason attributable to the request
    itself. `max_staleness` is in published weight versions: a rollout whose oldest token is further behind the
    current version than this is restarted from the prompt at dispatch or resume, and gets the disposition `stale`
    at delivery; None switches it off. `mask_off_policy` zeroes the loss mask of tokens older
    than the newest of their own sample, see `loss_mask`. `max_carries` is the starvation guard: a rollout carried that often is dispatched before
    any that was not. `eos_token_ids` are the model's end-of-sequence ids: a prefix that ends with one is complete
    and is not resumed (an abort may overtake the end that the model had just sampled). Back-off times are in seconds; each is multiplied by a random factor in [0.5, 1).
    """

    on_abort: OnAbort = OnAbort.KEEP
    max_attempts: int = 4
    backoff_initial: float = 0.2
    backoff_max: float = 30.0
    first_token_timeout: float | None = 600.0
    idle_timeout: float | None = 300.0
    max_staleness: int | None = None
    mask_off_policy: bool = False
    max_carries: int = 3
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Refuse settings that cannot work, by name."""
        if self.max_attempts < 1:
            raise ConfigurationError(f"max_attempts must be at least 1, not {self.max_attempts}")
        if not 0 < self.backoff_initial <= self.backoff_max:
            raise ConfigurationError(
                f"backoff_initial ({self.backoff_initial}) must be above 0 and at most backoff_max ({self.backoff_max})"
            )
        for name in ("first_token_timeout", "idle_timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name} must be above 0 seconds or None, not {value}")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ConfigurationError(
                f"max_staleness must be 0 or more versions, or None, not {self.max_staleness}"
            )
        if self.max_carries < 1:
            raise ConfigurationError(f"max_carries must be at least 1, not {self.max_carries}")

    def loss_mask(self, sample: Snapshot) -> list[int]:
        """1 for each token of a sample to train on, 0 for the others.

        With `mask_off_policy` a token is masked when its version is not that of the sample's last token: the kept
        prefix of a sample that was resumed under newer weights, and nothing of a sample that finished under the
        weights it began with, however late it is delivered. Where the last token's version is unknown nothing is
        masked; where only an earlier one's is, that token is.
        """
        last = sample.spans[-1] if sample.spans else None
        if not self.mask_off_policy or last is None or last.end != len(sample.tokens):
            return sample.loss_mask()
        return sample.loss_mask(last.version)


DEFAULT_POLICY = Policy()
