"""SGLang: native `/generate` streams, aborts, pauses and weight labels, direct or behind sglang-router.

`SGLangBackend` is what a `LifecycleEngine` takes; the rest is its parts. Facts of the protocol were read in the
sources of SGLang 0.4.6.post5 to 0.5.23 and seen on a running 0.5.23 with sglang-router 0.3.2.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapters.sglang.backend import SGLangBackend

__all__ = ["SGLangBackend"]


def __getattr__(name: str) -> Any:
    """Load on first use, so that the simulator's or the decoder's users need no HTTP client (PEP 562)."""
    if name in __all__:
        return getattr(import_module("adapters.sglang.backend"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
