"""A backend over simulated servers without sockets: the brains are stepped by the (virtual) clock of the event loop.

What the brains say goes through the adapter's own decoder, as bytes, cut where the test says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import count

import anyio

from adapters.sglang.answers import Answer, end, http_answer
from adapters.sglang.attempt import AttemptDecoder
from adapters.sglang.outgoing import request_body
from adapters.sglang.simulator.brain import Brain, Reply, ServerDead
from adapters.sglang.simulator.request import Mark, Request
from adapters.sglang.simulator.text import encode
from lifecycle.backend import AbortReceipt, Call, CallRef, ReceiptStatus, UpdateMode, WorkerReceipt
from lifecycle.events import Accepted, StreamEvent

STEP_SECONDS = 0.05


def status_of(reply: Reply | None) -> ReceiptStatus:
    """What a control call came to; None: the server is dead."""
    if reply is None:
        return ReceiptStatus.UNREACHABLE
    return ReceiptStatus.ACCEPTED if reply.status == 200 else ReceiptStatus.REFUSED


class BrainBackend:
    """Implements `Backend` over one or more brains. `cut` says where a piece of bytes is split (0: not at all)."""

    def __init__(self, brains: Sequence[Brain], cut: Callable[[int], int] = lambda _: 0) -> None:
        self.brains = list(brains)
        self.open = 0
        self._cut = cut
        self._turn = count()

    async def step_for_ever(self) -> None:
        """Let the servers work; to be run beside the engine."""
        while True:
            await anyio.sleep(STEP_SECONDS)
            for brain in self.brains:
                brain.step()

    async def stream(self, call: Call) -> AsyncIterator[Sequence[StreamEvent]]:
        """One request to the next brain in turn."""
        brain = self.brains[next(self._turn) % len(self.brains)]
        await anyio.sleep(STEP_SECONDS / 10)
        try:
            request = brain.submit(request_body(call))
        except ServerDead:
            yield [end(Answer.NO_CONNECTION, "refused")]
            return
        self.open += 1
        try:
            async with aclosing(self._read(brain, request, call)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self.open -= 1
            request.on_ready = None
            brain.disconnect(request)

    async def _read(self, brain: Brain, request: Request, call: Call) -> AsyncIterator[Sequence[StreamEvent]]:
        ready = anyio.Event()
        request.on_ready = lambda: ready.set()  # noqa: PLW0108  whichever event is there by then
        while (head := brain.head(request)) is None:  # noqa: ASYNC110  a brain does not tell
            await anyio.sleep(STEP_SECONDS)
        if head.status != 200:
            yield [end(http_answer(head.status), "refused")]
            return
        yield [Accepted(f"brain-{self.brains.index(brain)}")]
        decoder = AttemptDecoder(call)
        while not decoder.ended:
            ready = anyio.Event()
            for part in brain.poll(request) or ():
                if isinstance(part, Mark):
                    if not decoder.ended:
                        yield [decoder.close(Answer.CUT if part is Mark.CUT else Answer.EOF)]
                    return
                at = self._cut(len(part))
                for piece in (part[:at], part[at:]):
                    events = decoder.feed(piece)
                    if events:
                        yield events
            if not decoder.ended:
                await ready.wait()

    async def abort(
        self, calls: Sequence[CallRef], *, deadline: float, everything: bool = False
    ) -> Sequence[AbortReceipt]:
        """Every rid to every brain, as behind a router."""
        await anyio.sleep(min(deadline, STEP_SECONDS / 10))
        rids = tuple(call.rid for call in calls)
        receipts = []
        for number, brain in enumerate(self.brains):
            for rid in ("",) if everything else rids:
                reply = brain.abort(rid, abort_all=everything) if brain.alive else None
                receipts.append(
                    AbortReceipt(f"brain-{number}", status_of(reply), rids if everything else (rid,))
                )
        return receipts

    async def pause(self, mode: UpdateMode, *, deadline: float) -> Sequence[WorkerReceipt]:
        """Pause every brain."""
        await anyio.sleep(min(deadline, STEP_SECONDS))
        return [
            self._receipt(n, brain, lambda brain: brain.pause(str(mode)))
            for n, brain in enumerate(self.brains)
        ]

    async def resume(self, version: str | None, *, deadline: float) -> Sequence[WorkerReceipt]:
        """Publish and continue on every brain."""
        await anyio.sleep(min(deadline, STEP_SECONDS))

        def go_on(brain: Brain) -> Reply:
            if version is not None:
                brain.update_weight_version(version, abort_all_requests=False)
            return brain.resume()

        return [self._receipt(number, brain, go_on) for number, brain in enumerate(self.brains)]

    async def workers(self, *, deadline: float) -> Sequence[WorkerReceipt]:
        """What every brain holds."""
        await anyio.sleep(min(deadline, STEP_SECONDS))
        return [self._receipt(number, brain, lambda _: Reply()) for number, brain in enumerate(self.brains)]

    def _receipt(self, number: int, brain: Brain, ask: Callable[[Brain], Reply]) -> WorkerReceipt:
        name = f"brain-{number}"
        if not brain.alive:
            return WorkerReceipt(name, ReceiptStatus.UNREACHABLE)
        status = status_of(ask(brain))
        running, waiting = len(brain.scheduler.running), len(brain.scheduler.waiting)
        return WorkerReceipt(name, status, version=brain.weight_version, running=running, waiting=waiting)

    async def tokenize(self, text: str) -> Sequence[int]:
        """The ids of a text."""
        await anyio.sleep(STEP_SECONDS)
        return encode(text)
