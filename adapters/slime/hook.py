"""`generate`: one sample, from within slime's own loops (`--custom-generate-function-path`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from adapters.slime import framework
from adapters.slime.binding import Item, Place, Writer, is_finished, item_of, reconciled
from adapters.slime.runtime import Runtime, runtime_for
from lifecycle.engine import RolloutHandle
from lifecycle.snapshot import Snapshot
from lifecycle.states import Reason, RolloutState

LOOK_SECONDS = 0.05


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any]) -> Any:
    """Generate for one `Sample` and write back what came of it, whatever happens.

    - A finished sample is returned as it is; `sampling_params` is read only.
    - slime's abort (its task cancelled, or its flag raised where it cancels no tasks) ends the request on its server
      and waits for the answer; what finished first stays finished.
    - Any other cancellation does the same, writes the prefix, and goes on being a cancellation.
    - Aborted samples keep their tokens and go on from them when slime hands them in again, here or elsewhere.
    - FAILED ones are marked `remove_sample`, so that they are not trained on.
    """
    if is_finished(sample):
        return sample
    state = framework.generate_state(args)
    if state.aborted:
        sample.status = type(sample).Status.ABORTED
        return sample
    runtime = runtime_for(args)
    item = item_of(args, sample, sampling_params, state.tokenizer, _place(args, sample))
    skip = bool(sampling_params.get("skip_special_tokens", True))
    writer = Writer(args, state.tokenizer, runtime.policy(keep=True), skip)
    ticket = Ticket(runtime, item, keep=bool(getattr(args, "partial_rollout", False)))
    running = asyncio.wrap_future(runtime.thread.start(ticket.run))
    cancelled = await _settle(state, ticket, running)
    writer.write(sample, running.result())
    task = asyncio.current_task()
    if cancelled == 1 and task is not None and framework.is_slimes_abort(state, task):
        task.uncancel()
    elif cancelled:
        raise asyncio.CancelledError
    return sample


# What slime looks for since pull request 2272.
generate.abort_mode = "request"  # type: ignore[attr-defined]


class Ticket:
    """One call of the hook, as it lives in the engine's loop."""

    def __init__(self, runtime: Runtime, item: Item, *, keep: bool) -> None:
        self.runtime = runtime
        self._item = item
        self._keep = keep
        self._handle: RolloutHandle | None = None

    async def run(self) -> Snapshot:
        """Submit, wait for rest; a rollout that nobody will ask for again does not stay in the engine."""
        engine = self.runtime.thread.engine
        item = reconciled(engine, self._item)
        self._handle = engine.submit(item, policy=self.runtime.policy(keep=True))
        snapshot = await self._handle.wait()
        if snapshot.state is RolloutState.ABORTED and not (self._keep and snapshot.tokens):
            engine.discard(self._handle, reason=snapshot.reason or Reason.REQUESTED)
        return snapshot

    async def abort(self, reason: Reason) -> None:
        """End it on its server, within the settings' `abort_timeout`."""
        if self._handle is not None and not self._handle.at_rest:
            await self._handle.abort(reason=reason)


async def _settle(state: Any, ticket: Ticket, running: asyncio.Future[Snapshot]) -> int:
    """Wait until the rollout rests, abort it when told to; returns how often this task was cancelled meanwhile."""
    flag = None if framework.cancels_requests(state) else _watch(state)
    awaited: set[asyncio.Future[Any]] = {running}
    if flag is not None:
        awaited.add(flag)
    try:
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        ours = framework.is_slimes_abort(state, asyncio.current_task())
        reason = Reason.OVER_SAMPLED if ours else Reason.CANCELLED
        return 1 + await _through(ticket, running, reason)
    finally:
        if flag is not None:
            flag.cancel()
    return 0 if running.done() else await _through(ticket, running, Reason.OVER_SAMPLED)


async def _through(ticket: Ticket, running: asyncio.Future[Snapshot], reason: Reason) -> int:
    """Abort and wait for the rest, which is bounded; returns how many more cancellations came meanwhile."""
    ending = asyncio.wrap_future(ticket.runtime.thread.start(ticket.abort, reason))
    awaited: set[asyncio.Future[Any]] = {running, ending}
    cancelled = 0
    while not (running.done() and ending.done()):
        try:
            await asyncio.wait(awaited)
        except asyncio.CancelledError:
            cancelled += 1
    ending.result()
    return cancelled


def _place(args: Any, sample: Any) -> Place:
    """The group in the log; slime numbers the samples of a group in a row."""
    size = int(getattr(args, "n_samples_per_prompt", 1))
    if sample.group_index is None or sample.index is None:
        return Place()
    return Place(f"g{sample.group_index}", size, int(sample.index) % size)


# -- slimes that raise a flag and abort whole servers instead of cancelling tasks -------------------------------------


class FlagWatch:
    """Looks at one flag for all calls of one event loop: a look per call and tick would be thousands a second."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Any] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, state: Any) -> asyncio.Future[None]:
        """A future that is set soon after `state.aborted` is."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = state
        future.add_done_callback(lambda done: self._waiting.pop(done, None))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._look())
        return future

    async def _look(self) -> None:
        while self._waiting:
            for future, state in list(self._waiting.items()):
                if state.aborted and not future.done():
                    future.set_result(None)
            await asyncio.sleep(LOOK_SECONDS)


_WATCHES: WeakKeyDictionary[asyncio.AbstractEventLoop, FlagWatch] = WeakKeyDictionary()


def _watch(state: Any) -> asyncio.Future[None]:
    return _WATCHES.setdefault(asyncio.get_running_loop(), FlagWatch()).add(state)
