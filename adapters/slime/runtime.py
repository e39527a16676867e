"""The engines behind the hooks: slime calls plain functions, so somebody must remember what lives between calls."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from adapters.sglang import SGLangBackend
from adapters.slime.binding import Item
from adapters.slime.settings import Settings
from lifecycle.backend import Backend
from lifecycle.policy import OnAbort, Policy
from lifecycle.stores import SqliteStore
from lifecycle.thread import EngineThread

LABEL_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class OpenGroup:
    """Samples of one prompt that were taken from the data source and not delivered yet."""

    id: str
    samples: list[Any]


@dataclass(slots=True, eq=False)
class Runtime:
    """One engine in its thread, and the groups that `generate_rollout` has begun and not delivered.

    `open_groups` are what a checkpoint must hold besides the data source's cursor; `ready` are whole groups of a step
    that could not be finished; `drawn` are groups that a data source gave beyond the one it was asked for. `opened`
    closes the thread, then its store.
    """

    settings: Settings
    thread: EngineThread
    backend: Backend
    opened: ExitStack
    open_groups: dict[str, OpenGroup] = field(default_factory=dict)
    ready: list[OpenGroup] = field(default_factory=list)
    drawn: deque[list[Item]] = field(default_factory=deque)

    def policy(self, *, keep: bool) -> Policy:
        """How rollouts are treated; without `keep` a resume begins again at the prompt."""
        return Policy(
            on_abort=OnAbort.KEEP if keep else OnAbort.RESTART,
            max_attempts=self.settings.max_attempts,
            max_staleness=self.settings.max_staleness,
            max_carries=self.settings.max_carries,
            mask_off_policy=self.settings.mask_off_policy,
        )

    async def notice_weights(self) -> None:
        """Ask the servers for their label, because slime changes the weights and tells nobody. In the engine's loop."""
        receipts = await self.backend.workers(deadline=LABEL_SECONDS)
        labels = {receipt.version for receipt in receipts if receipt.version is not None}
        if len(labels) == 1:
            self.thread.engine.note_version(labels.pop())

    def undelivered(self) -> list[list[Any]]:
        """The samples of every group that is not delivered, whole ones first."""
        return [group.samples for group in (*self.ready, *self.open_groups.values())]


_RUNTIMES: dict[tuple[int, Settings], Runtime] = {}
_LOCK = threading.Lock()


def runtime_for(args: Any) -> Runtime:
    """The runtime for these settings, in this process; made at the first call, ended by `close_all` or at exit."""
    settings = Settings.from_args(args)
    key = (os.getpid(), settings)
    with _LOCK:
        runtime = _RUNTIMES.get(key)
        if runtime is None:
            runtime = _RUNTIMES[key] = _make(settings)
        return runtime


def existing_runtime(args: Any) -> Runtime | None:
    """The runtime for these settings if there is one."""
    with _LOCK:
        return _RUNTIMES.get((os.getpid(), Settings.from_args(args)))


def close_all() -> None:
    """End every engine of this process: abort on the servers, save, join the threads."""
    with _LOCK:
        mine = [key for key in _RUNTIMES if key[0] == os.getpid()]
        runtimes = [_RUNTIMES.pop(key) for key in mine]
    for runtime in runtimes:
        runtime.opened.close()


atexit.register(close_all)


def backend_for(settings: Settings) -> AbstractAsyncContextManager[Backend]:
    """The backend of an engine; called and entered in the engine's thread."""
    return SGLangBackend(
        settings.url,
        workers=settings.workers,
        api_key_env=settings.api_key_env,
        max_connections=settings.max_in_flight,
        transport=settings.transport,
    )


def _make(settings: Settings) -> Runtime:
    backends: list[Backend] = []

    @asynccontextmanager
    async def backend() -> AsyncIterator[Backend]:
        async with backend_for(settings) as opened:
            backends.append(opened)
            yield opened

    with ExitStack() as opened:
        thread = EngineThread(
            backend,
            name="lifecycle-slime",
            max_in_flight=settings.max_in_flight,
            log=settings.log,
            store=None if settings.store is None else opened.enter_context(SqliteStore(settings.store)),
            abort_timeout=settings.abort_timeout,
            unreachable_timeout=settings.unreachable_timeout,
        )
        opened.enter_context(thread)
        return Runtime(settings, thread, backends[0], opened.pop_all())
