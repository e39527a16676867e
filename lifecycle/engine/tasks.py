"""The tasks of an engine. Only the engine ends them: a cancellation from outside ends the engine in order first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVarTuple

import anyio
import anyio.abc

Args = TypeVarTuple("Args")


class EngineTasks:
    """A task group whose tasks are shielded, each by a scope that is cancelled when the engine is through."""

    def __init__(self) -> None:
        self._group: anyio.abc.TaskGroup = anyio.create_task_group()
        self._scopes: set[anyio.CancelScope] = set()

    async def open(self) -> None:
        """From here on tasks can be started."""
        await self._group.__aenter__()

    def start(
        self,
        function: Callable[[*Args], Awaitable[object]],
        *args: *Args,
        scope: anyio.CancelScope | None = None,
    ) -> None:
        """Run `function(*args)`; `scope`, a shielding one, lets the caller end it alone."""
        scope = scope or anyio.CancelScope(shield=True)
        self._scopes.add(scope)
        self._group.start_soon(self._run, scope, function, args)

    async def _run(
        self, scope: anyio.CancelScope, function: Callable[..., Awaitable[object]], args: tuple[object, ...]
    ) -> None:
        try:
            with scope:
                await function(*args)
        finally:
            self._scopes.discard(scope)

    async def close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """End every task. The caller's own exception goes on as it is, not in a group; a cancellation goes on too."""
        for scope in self._scopes:
            scope.cancel()
        self._group.cancel_scope.cancel()
        if isinstance(error, anyio.get_cancelled_exc_class()):
            return await self._group.__aexit__(kind, error, trace)
        await self._group.__aexit__(None, None, None)
        return None
