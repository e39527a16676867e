"""Aborts on their way: batched, sent again until they are answered, given up at their deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from lifecycle.backend import AbortReceipt, ReceiptStatus
from lifecycle.call import CallRef
from lifecycle.engine.core import Core
from lifecycle.engine.flight import Flight
from lifecycle.states import Reason

if TYPE_CHECKING:
    from lifecycle.backend import Backend


@dataclass(slots=True, eq=False)
class PendingAbort:
    """One attempt that was asked to end. Times are monotonic seconds."""

    flight: Flight
    timeout: float
    deadline: float
    send_at: float
    rounds: int = 0
    accepted: bool = False


class Aborts:
    """Every abort without an outcome. `tick` says what is due; `send` asks the workers."""

    def __init__(self, core: Core, backend: Backend) -> None:
        self._core = core
        self._backend = backend
        self.pending: dict[str, PendingAbort] = {}
        self.receipts: list[AbortReceipt] = []
        self.keep_receipts = 0
        self.everything = False

    def add(self, flight: Flight, timeout: float) -> None:
        """Ask for the end of an attempt; a second ask can only bring the deadline forward."""
        now = self._core.clock.monotonic()
        known = self.pending.get(flight.rid)
        if known is None:
            self.pending[flight.rid] = PendingAbort(flight, timeout, now + timeout, now)
        else:
            known.deadline = min(known.deadline, now + timeout)
        self._core.wake()

    def resolve(self, flight: Flight) -> None:
        """The attempt is over."""
        self.pending.pop(flight.rid, None)

    def restart_deadlines(self) -> None:
        """The servers run again: aborts that they could not answer while paused get their time now."""
        now = self._core.clock.monotonic()
        for abort in self.pending.values():
            abort.deadline = now + abort.timeout
            abort.send_at = min(abort.send_at, now)

    def next_due(self) -> float | None:
        """When `tick` must be called next."""
        times = [abort.send_at for abort in self.pending.values() if not self._held(abort)]
        if not self._core.servers_paused:
            times += [abort.deadline for abort in self.pending.values()]
        return min(times, default=None)

    def tick(self, now: float) -> list[PendingAbort]:
        """Give up what is overdue and return the batch that must be sent now."""
        if not self._core.servers_paused:
            for abort in [a for a in self.pending.values() if a.deadline <= now]:
                self._core.expire(abort.flight, Reason.ABORT_DEADLINE)
        batch = [a for a in self.pending.values() if a.send_at <= now and not self._held(a)]
        for abort in batch:
            pause = self._core.settings.abort_resend * 2.0 ** min(abort.rounds, 30)
            abort.rounds += 1
            abort.send_at = now + min(pause, self._core.settings.abort_resend_max)
        return batch

    def _held(self, abort: PendingAbort) -> bool:
        """Whether a pause of ours may hold the request before its scheduler has seen it.

        SGLang loses an abort of such a request, and acts on no later one of it, nor on its closed connection
        (tokenizer_manager.py, 0.5.23): it would run to its end. What has shown a token has been seen.
        """
        return self._core.servers_paused and abort.flight.rollout.attempt_tokens == 0

    async def send(self, batch: Sequence[PendingAbort]) -> None:
        """Ask the workers to end a batch; what no worker accepted is closed at once."""
        refs = [abort.flight.ref for abort in batch]
        receipts = await self._ask(refs, everything=self.everything)
        self._note(receipts, max(abort.rounds for abort in batch))
        heard = {rid for receipt in receipts for rid in receipt.rids}
        accepted = {rid for r in receipts if r.status is ReceiptStatus.ACCEPTED for rid in r.rids}
        for abort in batch:
            rid = abort.flight.rid
            abort.accepted = abort.accepted or rid in accepted
            if rid in heard and not abort.accepted and self.pending.get(rid) is abort:
                self._core.expire(abort.flight, Reason.ABORT_REFUSED)

    async def dismiss(self, ref: CallRef) -> None:
        """Tell the workers about an attempt we have given up on, without waiting for what comes of it."""
        self._note(await self._ask([ref], everything=False), 1)

    async def sweep(self) -> None:
        """Tell the workers to end everything they hold, where nothing of ours is in flight to be asked for."""
        self._note(await self._ask([], everything=True), 1)

    def _note(self, receipts: Sequence[AbortReceipt], rounds: int) -> None:
        self._core.recorder.aborts(receipts, round_=rounds, pending=len(self.pending))
        if self.keep_receipts:
            self.receipts.extend(receipts)

    async def _ask(self, refs: Sequence[CallRef], *, everything: bool) -> Sequence[AbortReceipt]:
        limit = self._core.settings.control_timeout
        rids = tuple(ref.rid for ref in refs)
        try:
            # A backend keeps its deadline and says who accepted by then; this only guards against one that does not.
            with anyio.fail_after(1.5 * limit):
                return await self._backend.abort(refs, deadline=limit, everything=everything)
        except TimeoutError:
            detail = f"no answer within {limit:g} s"
        except Exception as error:  # noqa: BLE001  an adapter that raises must not stop other aborts
            detail = f"the backend raised {type(error).__name__}"
        return [AbortReceipt("all", ReceiptStatus.UNREACHABLE, rids, detail)]
