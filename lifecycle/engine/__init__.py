"""The engine: drives rollouts through the machine against a backend. `engine.py` is its face."""

from __future__ import annotations

from lifecycle.engine.engine import LifecycleEngine
from lifecycle.engine.groups import Batch
from lifecycle.engine.handle import RolloutHandle
from lifecycle.engine.reports import AbortReport, EngineStats, RestoreReport
from lifecycle.engine.settings import Clock, EngineSettings

__all__ = [
    "AbortReport",
    "Batch",
    "Clock",
    "EngineSettings",
    "EngineStats",
    "LifecycleEngine",
    "RestoreReport",
    "RolloutHandle",
]
