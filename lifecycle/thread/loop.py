"""A thread with an event loop that keeps one async context manager open, and takes calls from every other thread."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

import anyio
from anyio.from_thread import BlockingPortal

from lifecycle.errors import ConfigurationError, EngineClosed

T = TypeVar("T")
R = TypeVar("R")
LOOK_AGAIN_SECONDS = 0.05
SIGNAL_SECONDS = 0.5
"""How long a wait may last before signals are looked for; see `result_of`."""


class LoopThread(Generic[T]):
    """Enters `make()` in a new thread's loop for as long as the `with` block runs; `held` is what that gave.

    `make` is called in the new thread, so that whatever it opens belongs to that thread's loop. Exceptions of the
    start are raised by the `with` line. The block is left when the thread is gone, interrupted or not: a
    KeyboardInterrupt meanwhile is raised afterwards.

    After a fork the thread exists in the parent only; in the child every call raises EngineClosed.
    """

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[T]], *, loop: str, name: str, what: str
    ) -> None:
        if loop not in {"asyncio", "trio"}:
            raise ConfigurationError(f"loop must be 'asyncio' or 'trio', not {loop!r}")
        self._make = make
        self._loop = loop
        self._name = name
        self._what = what
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._ready: Future[None] = Future()
        self._gone = threading.Event()
        self._portal: BlockingPortal | None = None
        self._leave: anyio.Event | None = None
        self._held: T | None = None
        self._closing = False
        self._failure: BaseException | None = None

    @property
    def held(self) -> T:
        """What `make()` gave; to be touched in the loop's own thread only."""
        if self._held is None:
            raise self._closed()
        return self._held

    # -- life --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start the thread; returns when the context manager is entered."""
        if self._thread is not None:
            raise EngineClosed(f"{self._what} can be entered once")
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        self._thread.start()
        try:
            result_of(self._ready)
        except BaseException:
            self._shut_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the context manager and wait for the thread."""
        if os.getpid() != self._process:
            return
        try:
            self._shut_down()
        except KeyboardInterrupt:
            self._shut_down()  # it may have come between two lines there, before all was done
            raise
        if self._failure is not None and error is None:
            raise self._failure

    def _main(self) -> None:
        try:
            anyio.run(self._live, backend=self._loop)
        except BaseException as error:  # noqa: BLE001  it belongs to the thread that waits for this one
            self._failure = _only(error)
        if not self._ready.done():
            self._ready.set_exception(self._failure or self._closed())
        self._gone.set()

    async def _live(self) -> None:
        async with BlockingPortal() as portal:
            try:
                async with self._make() as held:
                    self._portal, self._held, self._leave = portal, held, anyio.Event()
                    self._ready.set_result(None)
                    if not self._closing:
                        await self._leave.wait()
            finally:
                self._closing = True
                await portal.stop(cancel_remaining=True)

    def _shut_down(self) -> None:
        interrupt: BaseException | None = None
        told = False
        # Not `join`: on CPython 3.11 an interrupted join takes a running thread for dead (gh-90882).
        while not self._gone.is_set():
            try:
                told = told or self._tell_to_leave()
                self._gone.wait(LOOK_AGAIN_SECONDS)
            except KeyboardInterrupt as error:
                interrupt = interrupt or error
        if self._thread is not None:
            self._thread.join()
        if interrupt is not None:
            raise interrupt

    def _tell_to_leave(self) -> bool:
        """Ask the thread to end; False while it has not come far enough to be asked."""
        with self._lock:
            self._closing = True
        portal, leave = self._portal, self._leave
        if portal is None or leave is None:
            return False
        with contextlib.suppress(RuntimeError):  # it is ending by itself
            portal.start_task_soon(leave.set)
        return True

    # -- calling in --------------------------------------------------------------------------------------------

    @overload
    def start(self, function: Callable[..., Coroutine[Any, Any, R]], *args: Any) -> Future[R]: ...

    @overload
    def start(self, function: Callable[..., R], *args: Any) -> Future[R]: ...

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `function(*args)`, plain or async, in the loop; cancelling the future cancels it there.

        From an asyncio loop: `await asyncio.wrap_future(thread.start(…))`. Raises EngineClosed when the thread has
        ended, is ending, or lives in another process.
        """
        self._check_process()  # before the lock: a fork may have copied it locked
        with self._lock:
            portal = self._check_callable()
            try:
                return portal.start_task_soon(self._guarded, function, args)
            except RuntimeError:
                raise self._closed() from None

    @overload
    def call(
        self, function: Callable[..., Coroutine[Any, Any, R]], *args: Any, timeout: float | None = None
    ) -> R: ...

    @overload
    def call(self, function: Callable[..., R], *args: Any, timeout: float | None = None) -> R: ...

    def call(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        """`start` and wait for the result, at most `timeout` seconds (then TimeoutError, and it is cancelled)."""
        future = self.start(function, *args)
        try:
            return result_of(future, timeout)
        except CancelledError:
            raise self._closed() from None
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(f"not done within {timeout:g} s") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    @contextmanager
    def hold(self, make: Callable[[], AbstractAsyncContextManager[None]]) -> Iterator[None]:
        """Keep another async context manager open in the loop while this block runs.

        It sees the exception that the block ends with. Leaving is waited for, interrupted or not.
        """
        guest = _Guest(make)
        done = self.start(guest.stay)
        try:
            result_of(guest.entered)
        except BaseException:
            done.cancel()
            raise
        try:
            yield
        except BaseException as error:
            guest.error = error
            raise
        finally:
            self.start(guest.leave.set)
            patiently(done)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise EngineClosed(
                f"{self._what} lives in process {self._process}, this is its fork {os.getpid()}: "
                "make one of its own here"
            )

    def _check_callable(self) -> BlockingPortal:
        if self._portal is None or self._closing:
            raise self._closed()
        if self._thread is threading.current_thread():
            raise ConfigurationError(f"a call from the thread of {self._what} itself would wait for itself")
        return self._portal

    def _closed(self) -> EngineClosed:
        if self._failure is not None:
            return EngineClosed(f"{self._what} has ended: {type(self._failure).__name__}")
        return EngineClosed(f"{self._what} is not open: use it inside its `with` block")

    async def _guarded(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A call that the end of the thread cuts short says so, instead of looking like somebody's cancellation."""
        try:
            result = function(*args)
            return await result if inspect.isawaitable(result) else result
        except anyio.get_cancelled_exc_class():
            if self._closing:
                raise self._closed() from None
            raise


class _Guest:
    """An async context manager that one task of the loop enters, holds open, and leaves when told to."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._make = make
        self.entered: Future[None] = Future()
        self.leave: anyio.Event
        self.error: BaseException | None = None

    async def stay(self) -> None:
        """All of it in one task, because cancel scopes must be left where they were entered."""
        try:
            self.leave = anyio.Event()
            block = self._make()
            await block.__aenter__()
        except BaseException as problem:
            self.entered.set_exception(problem)
            raise
        self.entered.set_result(None)
        try:
            await self.leave.wait()
        except BaseException as cut:
            await block.__aexit__(type(cut), cut, cut.__traceback__)
            raise
        # Handed over, not raised here: a KeyboardInterrupt raised in a task would end the whole loop.
        await block.__aexit__(None if self.error is None else type(self.error), self.error, None)


def result_of(future: Future[R], timeout: float | None = None) -> R:
    """The result, as `future.result(timeout)`, but a signal is never overlooked for longer than a moment.

    One that arrives just before the interpreter waits for a lock is handled when that wait is over: after Ctrl-C a
    wait without end would go on until the next.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SIGNAL_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return future.result(min(left, SIGNAL_SECONDS))
        except TimeoutError:
            if future.done():  # it is the future's own, or it has just come
                return future.result()
            if deadline is not None and left <= SIGNAL_SECONDS:
                raise


def patiently(future: Future[R]) -> R:
    """The result, waited for even when interrupted: the interrupt is raised afterwards."""
    interrupt: BaseException | None = None
    while True:
        try:
            result = result_of(future)
        except KeyboardInterrupt as error:
            if future.done():
                raise
            interrupt = interrupt or error
            continue
        if interrupt is not None:
            raise interrupt
        return result


def _only(error: BaseException) -> BaseException:
    """The one exception in a group of one; anything else as it is."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
