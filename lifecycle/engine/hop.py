"""From another thread back into the loop, on asyncio and on trio, without a thread that waits for it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


async def outcome(future: Future[T]) -> T:
    """What a future comes to that another thread fulfils. Cancelling the wait abandons the wait alone.

    Waiting costs an event and a callback. A thread per waiter would use up the threads that anyio lends to everybody
    in the process, and hold them for as long as a store stands still.
    """
    if not future.done():
        enter, done = _way_in(), anyio.Event()
        future.add_done_callback(lambda _: _call(enter, done.set))
        await done.wait()
    return future.result()


def _way_in() -> Callable[[Callable[[], Any]], object]:
    """How another thread has a function called in the loop that runs here. Trio first: asyncio may be its host."""
    if "trio" in sys.modules:
        import trio  # noqa: PLC0415  only where somebody uses it already

        with suppress(RuntimeError):
            return trio.lowlevel.current_trio_token().run_sync_soon
    return asyncio.get_running_loop().call_soon_threadsafe


def _call(enter: Callable[[Callable[[], Any]], object], function: Callable[[], Any]) -> None:
    with suppress(RuntimeError):  # the loop is gone, and with it whoever waited
        enter(function)
