"""The simulated language model: the next token and its logprob, as a pure function of everything before it.

A resume with ``prompt + kept`` therefore continues exactly where the first attempt stopped, and any test can
recompute, token by token, what a server must have said. The prefix is carried as one rolling hash, so a step
costs the same after ten tokens and after ten thousand.

Three more things may enter the function, each only where it is asked for: ``sampling_seed`` of a request (n
samples of one prompt then differ), the label of the weights (``version_dependent``: a test then sees in the
tokens themselves which weights made them), and tokens that are forbidden at a step (``min_new_tokens``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adapters.sglang.simulator.text import EOS_ID, SPECIAL_IDS, VOCAB_SIZE, encode

_MASK = (1 << 64) - 1
_PRIME = (1 << 61) - 1
_BASE = 1_099_511_628_211
_GOLDEN = 0x9E3779B97F4A7C15
_EOS_SCALE = 1 << 20

# Letters about as often as English has them: samples are then short words, and pleasant to look at.
_COMMON = "       eeeettttaaaoooiiinnnsshhrrddlluuccmmwwffggyyppbbvk.,"


def mix(value: int) -> int:
    """Scramble 64 bits so that every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def hash_text(text: str) -> int:
    """64 bits of a label; stable across processes, which ``hash()`` is not."""
    state = len(text) + 1
    for byte in text.encode():
        state = (state * _BASE + byte + 1) % _PRIME
    return mix(state)


def _alphabet() -> tuple[int, ...]:
    """1,024 ids to draw from: 31 of 32 spell pseudo-English, the rest is any id that is not special."""
    letters = [encode(letter)[0] for letter in _COMMON]
    anything = [token for token in range(VOCAB_SIZE) if token not in SPECIAL_IDS]
    table = [letters[slot % len(letters)] for slot in range(1024)]
    for slot in range(0, 1024, 32):
        table[slot] = anything[mix(slot) % len(anything)]
    return tuple(table)


_TABLE = _alphabet()


@dataclass(frozen=True, slots=True)
class Sample:
    """One step of the model: a token id and its logprob (≤ 0, six decimals, exact in JSON)."""

    token: int
    logprob: float


class TokenModel:
    """Next tokens as a function of (seed, prefix), and nothing else unless asked for.

    ``eos_probability`` is the chance of the end-of-sequence id at each position, decided by the same hash.
    """

    def __init__(
        self, seed: int = 0, *, eos_probability: float = 0.0, version_dependent: bool = False
    ) -> None:
        if not 0.0 <= eos_probability <= 1.0:
            raise ValueError(f"eos_probability must lie between 0 and 1, got {eos_probability}")
        self.seed = seed
        self.version_dependent = version_dependent
        self._start = mix(seed * _GOLDEN & _MASK) % _PRIME
        self._eos_below = round(eos_probability * _EOS_SCALE)

    def start(self, ids: Iterable[int]) -> int:
        """The rolling state after ``ids``; O(len(ids)), about 0.1 µs each."""
        state = self._start
        for token in ids:
            state = (state * _BASE + token + 1) % _PRIME
        return state

    @staticmethod
    def extend(state: int, token: int) -> int:
        """The rolling state after one more token."""
        return (state * _BASE + token + 1) % _PRIME

    def salt(self, version: str = "default", sampling_seed: int | None = None) -> int:
        """What else than the prefix decides the next token: constant between two weight updates."""
        salt = 0 if sampling_seed is None else mix((sampling_seed + 1) * _GOLDEN & _MASK)
        return salt ^ hash_text(version) if self.version_dependent else salt

    def next(self, state: int, salt: int = 0, forbidden: frozenset[int] = frozenset()) -> tuple[int, float]:
        """The token after ``state`` and its logprob; never one of ``forbidden``."""
        value = mix((state ^ salt) & _MASK)
        token = EOS_ID if (value >> 20) % _EOS_SCALE < self._eos_below else _TABLE[value & 1023]
        while token in forbidden:
            value = mix((value + _GOLDEN) & _MASK)
            token = _TABLE[value & 1023]
        return token, -(1 + (value >> 40) % 8_000_000) / 1e6

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """A logprob for every prompt token after the first, given those before it: one fewer than tokens."""
        state, logprobs = self._start, []
        for token in prompt:
            state = self.extend(state, token)
            logprobs.append(-(1 + mix(state) % 25_000_000) / 1e6)
        return logprobs[1:]

    def continuation(
        self,
        prefix: Sequence[int],
        count: int,
        *,
        version: str = "default",
        sampling_seed: int | None = None,
        forbidden: frozenset[int] = frozenset(),
    ) -> list[Sample]:
        """The next ``count`` tokens after ``prefix``, end-of-sequence ids and all."""
        state, salt = self.start(prefix), self.salt(version, sampling_seed)
        samples: list[Sample] = []
        for _ in range(count):
            token, logprob = self.next(state, salt, forbidden)
            samples.append(Sample(token, logprob))
            state = self.extend(state, token)
        return samples

    def first_difference(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        *,
        logprobs: Sequence[float | None] | None = None,
        versions: Sequence[str] | None = None,
        sampling_seed: int | None = None,
    ) -> int | None:
        """The first position where ``tokens`` are not what this model says after ``prompt``; None: all agree.

        ``logprobs`` and ``versions`` (one label per token) are compared and used where given.
        """
        state = self.start(prompt)
        for position, token in enumerate(tokens):
            version = versions[position] if versions is not None else "default"
            expected, logprob = self.next(state, self.salt(version, sampling_seed))
            if token != expected or (logprobs is not None and logprobs[position] != logprob):
                return position
            state = self.extend(state, token)
        return None
