"""Weight updates: stop what must stop, let the caller change the weights, start again. The gate is the state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from lifecycle.backend import Backend, ReceiptStatus, UpdateMode, WorkerReceipt
from lifecycle.engine.aborts import Aborts
from lifecycle.errors import UpdateTimeout
from lifecycle.states import GateTrigger, Reason

if TYPE_CHECKING:
    from lifecycle.engine.engine import LifecycleEngine

POLL_SECONDS = 0.2


class Updates:
    """One update at a time; the next one waits."""

    def __init__(self, engine: LifecycleEngine, backend: Backend, aborts: Aborts) -> None:
        self._engine = engine
        self._backend = backend
        self._aborts = aborts
        self._lock: anyio.Lock | None = None

    @asynccontextmanager
    async def run(
        self, version: str, mode: UpdateMode, *, exclusive: bool, timeout: float
    ) -> AsyncIterator[None]:
        """See `LifecycleEngine.weight_update`."""
        self._lock = self._lock or anyio.Lock()
        core = self._engine.core
        async with self._lock:
            core.move_gate(GateTrigger.PAUSE, mode=mode, version=version)
            try:
                with anyio.fail_after(timeout):
                    await self._settle(mode, exclusive=exclusive)
            except BaseException as error:
                with anyio.CancelScope(shield=True):
                    await self._run_servers(mode, None)
                core.move_gate(GateTrigger.RESUME, mode=mode, reason="could not settle")
                if isinstance(error, TimeoutError):
                    raise UpdateTimeout(self._why(mode, version, timeout)) from None
                raise
            core.move_gate(GateTrigger.SETTLE, mode=mode, version=version)
            try:
                yield
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._run_servers(mode, None)
                raise
            with anyio.CancelScope(shield=True):
                await self._run_servers(mode, version)
            core.recorder.versions.publish(version)
            core.restart_stale()
            core.move_gate(GateTrigger.RESUME, mode=mode, version=version)

    async def _settle(self, mode: UpdateMode, *, exclusive: bool) -> None:
        core, limit = self._engine.core, self._engine.settings.control_timeout
        if mode is UpdateMode.ABORT:
            await self._abort_ours(exclusive=exclusive)
            receipts = await self._backend.workers(deadline=limit)
            core.recorder.receipts("loads", receipts)
            while exclusive and any((r.running or 0) + (r.waiting or 0) for r in receipts):
                await self._aborts.sweep()
                await anyio.sleep(POLL_SECONDS)
                receipts = await self._backend.workers(deadline=limit)
            return
        core.servers_paused = True
        receipts = await self._backend.pause(mode, deadline=limit)
        core.recorder.receipts(f"pause_{mode}", receipts)
        while any(receipt.status is ReceiptStatus.REFUSED for receipt in receipts) or _none_alive(receipts):
            await anyio.sleep(POLL_SECONDS)
            receipts = await self._backend.pause(mode, deadline=limit)
            core.recorder.receipts(f"pause_{mode}", receipts)
        core.checkpoint_all()  # the block that follows is where trainers die

    async def _abort_ours(self, *, exclusive: bool) -> None:
        core, engine = self._engine.core, self._engine
        self._aborts.everything = exclusive
        try:
            while core.flights:
                flying = [flight.rollout for flight in core.flights.values()]
                for flight in list(core.flights.values()):
                    if flight.rid not in self._aborts.pending:
                        core.request_abort(
                            flight.rollout,
                            Reason.WEIGHT_UPDATE,
                            by_caller=False,
                            timeout=engine.settings.abort_timeout,
                        )
                for rollout in flying:
                    while rollout.in_flight:
                        await core.waiters.watch(rollout).wait()
        finally:
            self._aborts.everything = False

    async def _run_servers(self, mode: UpdateMode, version: str | None) -> None:
        core, limit = self._engine.core, self._engine.settings.control_timeout
        if mode is UpdateMode.ABORT and version is None:
            return
        receipts: Sequence[WorkerReceipt] = ()
        with anyio.move_on_after(3 * limit):
            receipts = await self._backend.resume(version, deadline=limit)
        core.recorder.receipts("resume", receipts)
        core.servers_paused = False
        self._aborts.restart_deadlines()
        core.wake()

    def _why(self, mode: UpdateMode, version: str, timeout: float) -> str:
        waiting = len(self._engine.core.flights)
        what = (
            f"{waiting} rollouts are still in flight"
            if mode is UpdateMode.ABORT
            else "not every worker has paused"
        )
        return f"the update to {version!r} ({mode}) did not settle within {timeout:g} s: {what}; the gate is open again"


def _none_alive(receipts: Sequence[WorkerReceipt]) -> bool:
    return all(receipt.status is ReceiptStatus.UNREACHABLE for receipt in receipts)
