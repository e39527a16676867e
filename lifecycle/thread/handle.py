"""A hold on one rollout, for plain code and for other event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

from lifecycle.engine import AbortReport, RolloutHandle
from lifecycle.snapshot import Snapshot
from lifecycle.states import Reason, RolloutState

if TYPE_CHECKING:
    from lifecycle.thread.engine import EngineThread


class ThreadHandle:
    """A hold on one rollout of an `EngineThread`: `wait()` in plain code, `await` it in any asyncio loop."""

    __slots__ = ("_thread", "inner")

    def __init__(self, thread: EngineThread, inner: RolloutHandle) -> None:
        self._thread = thread
        self.inner = inner

    def __repr__(self) -> str:
        """Id, state and tokens."""
        return repr(self.inner).replace("RolloutHandle", "ThreadHandle", 1)

    def __await__(self) -> Generator[Any, None, Snapshot]:
        """Wait without blocking the calling asyncio loop; cancelling abandons the wait, not the rollout."""
        return asyncio.wrap_future(self._thread.start(self.inner.wait)).__await__()

    @property
    def id(self) -> str:
        """The caller's id."""
        return self.inner.id

    @property
    def state(self) -> RolloutState:
        """The state of this moment."""
        return self.inner.state

    @property
    def at_rest(self) -> bool:
        """Whether `wait` would return without waiting for a server."""
        return self.inner.at_rest

    def snapshot(self) -> Snapshot:
        """What is held right now; changes nothing."""
        return self._thread.call(self.inner.snapshot)

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Block until the rollout is at rest. After `timeout` seconds: TimeoutError; the rollout goes on."""
        return self._thread.call(self.inner.wait, timeout=timeout)

    def abort(self, *, reason: Reason | str = Reason.REQUESTED, timeout: float | None = None) -> AbortReport:
        """End it and wait until it is at rest; see `LifecycleEngine.abort`."""
        return self._thread.abort([self], reason=reason, timeout=timeout)


Which = ThreadHandle | str
Scope = Which | Iterable[Which] | None


def inner(which: Which) -> RolloutHandle | str:
    """What the engine in the thread knows it by."""
    return which if isinstance(which, str) else which.inner


def inner_scope(which: Scope) -> list[RolloutHandle | str] | None:
    """The same for a scope."""
    if which is None:
        return None
    return [inner(one) for one in ([which] if isinstance(which, str | ThreadHandle) else which)]
