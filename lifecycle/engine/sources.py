"""Where groups come from: iterators, and async iterators that must not be broken off in the middle."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import anyio

from lifecycle.request import RolloutRequest
from lifecycle.snapshot import Snapshot

if TYPE_CHECKING:
    from lifecycle.engine.tasks import EngineTasks

GroupItem = Sequence[RolloutRequest | Snapshot]
Source = Iterable[GroupItem] | AsyncIterable[GroupItem]


class Feed:
    """Asks a source for its next group, when told to.

    An async source is asked by a task of the engine, not of the `collect` that wants the group: the stop of that
    `collect` would be thrown into the source, which ends a generator for good and loses the group it was about to
    give. What arrives after the stop goes to `late`.
    """

    def __init__(self, source: Source, late: Callable[[GroupItem], object]) -> None:
        self.source = source
        self._late = late
        self._groups: Iterator[GroupItem] | AsyncIterator[GroupItem] = (
            aiter(source) if isinstance(source, AsyncIterable) else iter(source)
        )
        self._asking = False
        self._wanted = False
        self._answer: GroupItem | Exception | None = None
        self._news = anyio.Event()

    @property
    def open(self) -> bool:
        """Whether the source still owes an answer, or has answered with an exception that nobody has seen."""
        return self._asking or self._answer is not None

    async def next(self, tasks: EngineTasks) -> GroupItem | None:
        """The next group, None when there are no more. Raises what the source raises."""
        if isinstance(self._groups, Iterator):
            return next(self._groups, None)
        self._wanted = True
        try:
            if not self._asking and self._answer is None:
                self._asking = True
                tasks.start(self._ask, self._groups)
            while self._asking:
                await self._news.wait()
        except BaseException:
            self._leave()
            raise
        self._wanted = False
        answer, self._answer = self._answer, None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _leave(self) -> None:
        """Nobody waits any more; an answer that has just come is late."""
        self._wanted = False
        if self._answer is not None and not isinstance(self._answer, Exception):
            self._late(self._answer)
            self._answer = None

    async def _ask(self, groups: AsyncIterator[GroupItem]) -> None:
        answer: GroupItem | Exception | None
        try:
            answer = await anext(groups, None)
        except Exception as error:  # noqa: BLE001  goes on in the task that asked
            answer = error
        if self._wanted or answer is None or isinstance(answer, Exception):
            self._answer = answer
        else:
            self._late(answer)
        self._asking = False
        self._news.set()
        self._news = anyio.Event()
