"""Inert stand-ins for what SGLang imports at load time and a text-only CPU run never calls.

Copied into the environment of the live tests, and only there, where a ``.pth`` line imports it at every start of the
interpreter. The stand-ins are seen by SGLang alone: transformers and torch *probe* for some of these packages, and
must go on finding that they are not there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

GPU_ONLY = (
    "cutlass",
    "deep_gemm",
    "flash_attn",
    "flashinfer",
    "quack",
    "sgl_deep_gemm",
    "sgl_kernel",
    "tilelang",
    "torch_memory_saver",
)
NOT_TEXT = ("decord", "timm", "tml_renderers", "torchvision")
NOTEBOOK = ("IPython",)
NAMES = frozenset(GPU_ONLY + NOT_TEXT + NOTEBOOK)


class _InertType(type):
    """Any attribute of an inert class is inert, so that ``from flashinfer import X`` finds an X."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Inert

    def __call__(cls, *args: object, **kwargs: object) -> object:
        # Used bare as a decorator, it hands the function back.
        if cls is Inert and len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return super().__call__()

    def __getitem__(cls, item: object) -> object:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[object]:
        return iter(())


class Inert(metaclass=_InertType):
    """Can be called, subclassed, subscripted and used as a decorator; does nothing."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """A bare decorator hands the function back; every other call gives something inert."""
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return self

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Inert


class InertModule(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Inert


def importing_package() -> str:
    """The top-level package whose code asks, looking past the import machinery itself."""
    machinery = {__name__, "importlib", "_frozen_importlib", "_frozen_importlib_external"}
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in machinery:
            return name
        frame = frame.f_back
    return ""


def _settle_transformers() -> None:
    """Make transformers ready before the first stand-in appears in ``sys.modules``."""
    import_utils = importlib.import_module("transformers.utils.import_utils")
    import_utils.is_torchvision_available()  # It caches the answer, which must be "no".
    # SGLang before 0.5.20 registers model types that a newer transformers has as well, and would stop there.
    configurations = importlib.import_module("transformers.models.auto.configuration_auto")
    factory = importlib.import_module("transformers.models.auto.auto_factory")
    for mapping in (configurations._LazyConfigMapping, factory._LazyAutoMapping):
        mapping.register = _overwriting(mapping.register)


def _overwriting(register: Callable[..., None]) -> Callable[..., None]:
    def register_anyway(mapping: object, key: object, value: object, *, exist_ok: bool = False) -> None:
        register(mapping, key, value, exist_ok=True)

    return register_anyway


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on ``sys.meta_path``: a package that is really installed is found before this is asked."""

    settled = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A stand-in for a known name that SGLang itself asks for; None for everyone else."""
        if fullname.partition(".")[0] not in NAMES or importing_package() != "sglang":
            return None
        if not StandInFinder.settled:
            StandInFinder.settled = True
            _settle_transformers()
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty module that has every name."""
        module = InertModule(spec.name)
        module.__version__ = "0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(StandInFinder())
