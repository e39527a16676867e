"""A backend without a server: each attempt plays a script, and what the engine asked for is written down."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import anyio

from lifecycle.backend import AbortReceipt, ReceiptStatus, UpdateMode, WorkerReceipt
from lifecycle.call import Call, CallRef
from lifecycle.events import EndKind, StreamEnd, StreamEvent, TokenSlice, token_slice
from lifecycle.states import FinishReason, Reason

WORKER = "scripted://worker"
ABORTED = StreamEnd(EndKind.ENDED, Reason.SERVER_ABORT, "Aborted")


@dataclass(frozen=True, slots=True)
class Pause:
    """The stream is silent for `seconds`, or until it is aborted, which ends it."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """The stream is silent until it is aborted, and then ends with `end`; with None it stays silent."""

    end: StreamEnd | None = ABORTED


Step = StreamEvent | Sequence[StreamEvent] | Pause | Hang
Script = Callable[[Call], Sequence[Step]]


def finish(reason: FinishReason = FinishReason.STOP) -> StreamEnd:
    """The end of a stream that completed."""
    return StreamEnd(EndKind.FINISHED, Reason(str(reason)), finish_reason=reason)


def tokens(*ids: int, version: str | None = "default") -> TokenSlice:
    """A slice of tokens with logprob -0.5 each."""
    return token_slice([(-0.5, token) for token in ids], version)


def lost(reason: Reason = Reason.DISCONNECTED) -> StreamEnd:
    """The end of a stream that broke."""
    return StreamEnd(EndKind.LOST, reason)


class ScriptedBackend:
    """Plays `script(call)` for every attempt; after the last step of a script without an end, it loses the stream.

    `calls`, `aborted` and `log` hold what the engine asked for, in order. `abort_status` is what the one worker
    answers to aborts; with `deaf` it accepts them and does nothing.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.aborted: list[str] = []
        self.log: list[str] = []
        self.live: dict[str, anyio.Event] = {}
        self.abort_status = ReceiptStatus.ACCEPTED
        self.deaf = False
        self.pause_status = ReceiptStatus.ACCEPTED
        self.version = "default"
        self.tokens_of_text: Callable[[str], Sequence[int]] = lambda text: list(text.encode())

    async def stream(self, call: Call) -> AsyncIterator[Sequence[StreamEvent]]:
        """Play the script of one attempt."""
        self.calls.append(call)
        asked = self.live[call.rid] = anyio.Event()
        try:
            for step in self.script(call):
                if isinstance(step, Pause):
                    with anyio.move_on_after(step.seconds):
                        await asked.wait()
                    if asked.is_set():
                        yield [ABORTED]
                        return
                elif isinstance(step, Hang):
                    await (anyio.sleep_forever() if step.end is None else asked.wait())
                    yield [step.end or ABORTED]
                    return
                else:
                    batch = list(step) if isinstance(step, Sequence) else [step]
                    await anyio.lowlevel.checkpoint()
                    yield batch
                    if any(isinstance(event, StreamEnd) for event in batch):
                        return
            yield [lost(Reason.TRUNCATED)]
        finally:
            del self.live[call.rid]

    async def abort(
        self, calls: Sequence[CallRef], *, deadline: float, everything: bool = False
    ) -> Sequence[AbortReceipt]:
        """Write the rids down and tell their streams."""
        await anyio.lowlevel.checkpoint()
        rids = tuple(call.rid for call in calls)
        self.aborted += rids
        self.log.append("abort_all" if everything else "abort")
        if self.abort_status is ReceiptStatus.ACCEPTED and not self.deaf:
            for rid in rids:
                if rid in self.live:
                    self.live[rid].set()
        return [
            AbortReceipt(WORKER, self.abort_status, rids, requests=len(rids), latency_s=min(deadline, 0.0))
        ]

    async def pause(self, mode: UpdateMode, *, deadline: float) -> Sequence[WorkerReceipt]:
        """Say that the one worker has paused."""
        await anyio.lowlevel.checkpoint()
        self.log.append(f"pause {mode} {deadline > 0}")
        return [WorkerReceipt(WORKER, self.pause_status)]

    async def resume(self, version: str | None, *, deadline: float) -> Sequence[WorkerReceipt]:
        """Say that the one worker runs again."""
        await anyio.lowlevel.checkpoint()
        self.log.append(f"resume {version} {deadline > 0}")
        self.version = version or self.version
        return [WorkerReceipt(WORKER, ReceiptStatus.ACCEPTED, version=self.version)]

    async def workers(self, *, deadline: float) -> Sequence[WorkerReceipt]:
        """The one worker and how many streams are open on it."""
        await anyio.lowlevel.checkpoint()
        status = ReceiptStatus.ACCEPTED if deadline > 0 else ReceiptStatus.UNREACHABLE
        return [WorkerReceipt(WORKER, status, version=self.version, running=len(self.live), waiting=0)]

    async def tokenize(self, text: str) -> Sequence[int]:
        """The ids of a text prompt."""
        await anyio.lowlevel.checkpoint()
        return self.tokens_of_text(text)
