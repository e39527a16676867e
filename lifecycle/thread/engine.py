"""The face of an engine for plain code: what `LifecycleEngine` offers, blocking, callable from any thread."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import Any

import anyio.to_thread

from lifecycle.backend import Backend, UpdateMode
from lifecycle.engine import AbortReport, Batch, EngineStats, LifecycleEngine
from lifecycle.engine.collecting import Filter, GroupItem, OnGroup, Source
from lifecycle.errors import SnapshotError
from lifecycle.ledger import LedgerView
from lifecycle.policy import Policy
from lifecycle.request import RolloutRequest
from lifecycle.snapshot import Snapshot
from lifecycle.states import Reason
from lifecycle.thread.handle import Scope, ThreadHandle, Which, inner, inner_scope
from lifecycle.thread.loop import LoopThread

BackendFactory = Callable[[], AbstractAsyncContextManager[Backend]]
_END: Any = object()


class EngineThread(LoopThread[LifecycleEngine]):
    """Runs one engine, in a thread with an event loop of its own, while the `with` block runs.

    For trainers without an event loop, and for frameworks that would cancel the task an engine lives in. Any thread
    may call it, several at once. `backend_factory` is called in the new thread and what it returns is entered there:
    `with EngineThread(lambda: SGLangBackend(url), log="lifecycle.jsonl") as engine:`. `loop` is `asyncio` or `trio`;
    further keywords are `LifecycleEngine`'s.

    A KeyboardInterrupt ends the call it falls into and, on the way out, the engine in order: rollouts are aborted on
    their servers (bounded by `close_timeout`) and saved, and the thread is gone before the `with` block is left.

    Time-outs are in seconds, of the calling side: TimeoutError, and the call is cancelled.
    """

    def __init__(
        self,
        backend_factory: BackendFactory,
        *,
        loop: str = "asyncio",
        name: str = "lifecycle-engine",
        **engine: Any,
    ) -> None:
        @asynccontextmanager
        async def both() -> AsyncIterator[LifecycleEngine]:
            async with backend_factory() as backend, LifecycleEngine(backend, **engine) as running:
                yield running

        super().__init__(both, loop=loop, name=name, what="the engine thread")

    @property
    def engine(self) -> LifecycleEngine:
        """The engine itself, to be touched in its own thread only: by what `start` and `call` run."""
        return self.held

    # -- rollouts ----------------------------------------------------------------------------------------------

    def submit(self, item: RolloutRequest | Snapshot, *, policy: Policy | None = None) -> ThreadHandle:
        """Take a request, or a snapshot to go on from; see `LifecycleEngine.submit`."""
        return ThreadHandle(self, self.call(lambda: self.engine.submit(item, policy=policy)))

    def generate(
        self,
        item: RolloutRequest | Snapshot,
        *,
        policy: Policy | None = None,
        timeout: float | None = None,
    ) -> Snapshot:
        """Submit and wait. Tied: a time-out or an interrupt aborts the rollout; its prefix is kept."""
        return self.call(lambda: self.engine.generate(item, policy=policy), timeout=timeout)

    def abort(
        self,
        which: Scope = None,
        *,
        group: str | None = None,
        reason: Reason | str = Reason.REQUESTED,
        timeout: float | None = None,
    ) -> AbortReport:
        """End some rollouts, a group, or all; see `LifecycleEngine.abort`."""
        scope = inner_scope(which)

        async def ask() -> AbortReport:
            return await self.engine.abort(scope, group=group, reason=reason, timeout=timeout)

        return self.call(ask)

    def discard(self, which: Which, *, reason: Reason | str = Reason.REQUESTED) -> None:
        """Give a rollout up that is pending or at rest."""
        self.call(lambda: self.engine.discard(inner(which), reason=reason))

    def collect(
        self,
        source: Source = (),
        *,
        target: int | None = None,
        filter: Filter | None = None,  # noqa: A002  the design's name
        max_groups: int | None = None,
        on_group: OnGroup | None = None,
        timeout: float | None = None,
    ) -> Batch:
        """Run groups until `target` of them are whole and accepted; see `LifecycleEngine.collect`.

        A plain `source`, `filter` and `on_group` run in worker threads, so they may take their time; what of them is
        async runs in the engine's loop. After `timeout`: nothing is delivered, everything is carried.
        """
        groups = source if isinstance(source, AsyncIterable) else _from_thread(iter(source))
        accept = None if filter is None else _in_thread(filter)
        told = None if on_group is None else _in_thread(on_group)

        async def run() -> Batch:
            return await self.engine.collect(
                groups, target=target, filter=accept, max_groups=max_groups, on_group=told
            )

        return self.call(run, timeout=timeout)

    def drain(self, timeout: float | None = None) -> None:
        """Block until every rollout is at rest."""
        self.call(self.engine.drain, timeout=timeout)

    def weight_update(
        self,
        version: str,
        mode: UpdateMode | str = UpdateMode.ABORT,
        *,
        exclusive: bool = False,
        timeout: float | None = None,
    ) -> AbstractContextManager[None]:
        """A block in which weights may be changed; see `LifecycleEngine.weight_update`."""
        return self.hold(
            lambda: self.engine.weight_update(version, mode, exclusive=exclusive, timeout=timeout)
        )

    def resume(self) -> None:
        """Open the gate again after a weight update that failed."""
        self.call(self.engine.resume)

    def note_version(self, version: str) -> None:
        """Somebody else has changed the weights; see `LifecycleEngine.note_version`."""
        self.call(lambda: self.engine.note_version(version))

    def restore(
        self, *, force: bool = False, resume: bool = True
    ) -> tuple[tuple[ThreadHandle, ...], tuple[SnapshotError, ...]]:
        """Bring back what the store holds: handles, and what could not be read; see `LifecycleEngine.restore`."""

        async def bring() -> tuple[tuple[ThreadHandle, ...], tuple[SnapshotError, ...]]:
            report = await self.engine.restore(force=force, resume=resume)
            return tuple(ThreadHandle(self, handle) for handle in report.handles), report.unreadable

        return self.call(bring)

    # -- looking -----------------------------------------------------------------------------------------------

    @property
    def process_id(self) -> str:
        """The name of this process in logs and as an owner in stores."""
        return self.engine.process_id

    @property
    def run_id(self) -> str:
        """The name of the run in logs."""
        return self.engine.run_id

    @property
    def version(self) -> str | None:
        """The weight label last published."""
        return self.engine.version

    @property
    def step(self) -> int | None:
        """The training step that log lines carry."""
        return self.engine.step

    @step.setter
    def step(self, step: int | None) -> None:
        self.call(lambda: setattr(self.engine, "step", step))

    def stats(self) -> EngineStats:
        """Numbers of this moment."""
        return self.call(self.engine.stats)

    def ledger(self) -> LedgerView:
        """Where every rollout is and what became of every token."""
        return self.call(self.engine.ledger)

    def places(self) -> dict[str, str]:
        """The place in the ledger of every rollout held, by id."""
        return self.call(self.engine.places)

    def handle(self, rollout_id: str) -> ThreadHandle:
        """The handle of a rollout the engine holds. Raises KeyError."""
        return ThreadHandle(self, self.call(self.engine.handle, rollout_id))


async def _from_thread(groups: Iterator[GroupItem]) -> AsyncIterator[GroupItem]:
    while (item := await anyio.to_thread.run_sync(next, groups, _END)) is not _END:
        yield item


def _in_thread(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def call(argument: Any) -> Any:
        answer = await anyio.to_thread.run_sync(function, argument)
        return await answer if inspect.isawaitable(answer) else answer

    return call
