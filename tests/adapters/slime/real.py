"""The real slime under the hooks, where a checkout and torch can be imported.

    PYTHONPATH=/path/to/slime python -m pytest tests/adapters/slime

Other packages that slime imports and these tests do not need (ray, transformers, …) get stand-ins where they are missing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

MODULES = (
    "rollout.sglang_rollout",
    "rollout.data_source",
    "rollout.base_types",
    "rollout.rm_hub",
    "rollout.filter_hub.base_types",
    "utils.async_utils",
    "utils.misc",
)


class Anything:
    """Can be called, decorated with, subclassed and looked into."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Something else."""
        return Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


def stand_in(name: str) -> ModuleType:
    """A module that has every name."""

    def look_up(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return type(attribute, (Anything,), {})

    module = ModuleType(name)
    module.__path__ = []
    module.__getattr__ = look_up  # type: ignore[method-assign]
    return module


def load(name: str) -> Any:
    """A module of slime, with stand-ins for what it lacks."""
    while True:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing.partition(".")[0] in {"", "slime", "torch"}:
                raise
            sys.modules[missing] = stand_in(missing)


def install(patch: pytest.MonkeyPatch, *, cancels: bool) -> None:
    """Import slime and forget its singletons; which generation the checkout is of decides what can run."""
    sys.modules.setdefault("transformers", stand_in("transformers"))  # slow, and no tokenizer of it is used
    found = {name: load(f"slime.{name}") for name in MODULES}
    found["utils.misc"].SingletonMeta._instances.clear()
    found["utils.misc"].load_function.cache_clear()
    has = hasattr(found["rollout.sglang_rollout"], "_run_request_abortable_generate")
    if has is not cancels:
        pytest.skip("this checkout of slime is of the other generation")
