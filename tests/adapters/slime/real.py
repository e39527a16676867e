"""The real slime under the hooks, where a checkout (and torch) can be imported; only what needs a GPU is left out."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

STAND_INS: dict[str, tuple[str, ...]] = {
    # What slime imports for tokenizers and servers, which no test here needs.
    "transformers": ("AutoProcessor", "AutoTokenizer", "PreTrainedTokenizerBase", "ProcessorMixin"),
}


def install(patch: pytest.MonkeyPatch, *, cancels: bool) -> None:
    """Import slime and forget its singletons; the generation of the checkout is what it is."""
    for name, classes in STAND_INS.items():
        if name not in sys.modules:
            module = ModuleType(name)
            module.__dict__.update({one: type(one, (), {}) for one in classes})
            sys.modules[name] = module
    rollout: Any = import_module("slime.rollout.sglang_rollout")
    for name in ("data_source", "base_types", "rm_hub", "filter_hub.base_types"):
        import_module(f"slime.rollout.{name}")
    import_module("slime.utils.misc").SingletonMeta._instances.clear()
    import_module("slime.utils.async_utils")
    import_module("slime.utils.misc").load_function.cache_clear()
    if hasattr(rollout, "_run_request_abortable_generate") is not cancels:
        pytest.skip("this checkout of slime is of the other generation")
