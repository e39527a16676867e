"""`EngineThread`: an engine behind a plain `with` block, in a thread with an event loop of its own."""

from __future__ import annotations

from lifecycle.thread.engine import BackendFactory, EngineThread
from lifecycle.thread.handle import ThreadHandle
from lifecycle.thread.loop import LoopThread

__all__ = ["BackendFactory", "EngineThread", "LoopThread", "ThreadHandle"]
