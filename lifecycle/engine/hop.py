"""From another thread back into the loop, on asyncio and on trio, without a thread that waits for it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar, cast

import anyio

T = TypeVar("T")
WayIn = Callable[[Callable[[], Any]], object]


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


def _way_in() -> WayIn:
    """How another thread has a function called in the loop that runs here. Trio first: asyncio may be its host."""
    with suppress(KeyError, RuntimeError):  # nobody has imported it; this is no task of it
        trio: Any = sys.modules["trio"]
        return cast("WayIn", trio.lowlevel.current_trio_token().run_sync_soon)
    return asyncio.get_running_loop().call_soon_threadsafe


def _call(enter: WayIn, function: Callable[[], Any]) -> None:
    with suppress(RuntimeError):  # the loop is gone, and with it whoever waited
        enter(function)
