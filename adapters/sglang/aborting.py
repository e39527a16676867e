"""Ending requests on the workers, with a receipt from each.

An abort goes to the worker that holds the request; where a router hides it, to every worker, one POST per rid,
because SGLang aborts by prefix and answers 200 to rids it does not know (0.5.23). Nothing of others is touched
unless the caller asks for everything by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import anyio

from adapters.sglang.asking import Asker, NoAnswer, spread
from adapters.sglang.live import LiveStreams
from adapters.sglang.topology import Topologies, Topology
from lifecycle.backend import AbortReceipt, CallRef, ReceiptStatus

WORKERS_AT_ONCE = 64
AT_ONCE = 32
"""Abort requests in flight at a time to one worker: a worker that hangs holds up none of the others."""
FANOUT_LIMIT = 8192
"""Above so many requests for one abort, `auto` closes the streams instead."""


class Strategy(StrEnum):
    """How aborts are made."""

    AUTO = "auto"  # fanout, unless that would take more than FANOUT_LIMIT requests
    FANOUT = "fanout"  # one POST per rid to the worker that holds it, or to all where a router hides it
    CLOSE = "close"  # close the streams; the workers notice (not on 0.5.18 and 0.5.19: zombies)
    ABORT_ALL = "abort_all"  # one POST per worker, ends requests of others too: only with everything=True


@dataclass(frozen=True, slots=True)
class _Told:
    """What came of one POST, or of none where the worker had failed before."""

    worker: str
    rid: str
    status: ReceiptStatus
    detail: str | None
    latency: float
    sent: bool = True


class Aborter:
    """Makes aborts. `strategy` is auto, fanout or close."""

    def __init__(self, asker: Asker, topologies: Topologies, live: LiveStreams, strategy: Strategy) -> None:
        self._asker = asker
        self._topologies = topologies
        self._live = live
        self._strategy = strategy

    async def abort(
        self, calls: Sequence[CallRef], *, deadline: float, everything: bool
    ) -> list[AbortReceipt]:
        """One receipt per worker and answer. `deadline` in seconds from now."""
        stop = anyio.current_time() + deadline
        if everything:
            return await self._everything(tuple(call.rid for call in calls), stop)
        if not calls:
            return []
        if self._strategy is Strategy.CLOSE:
            return await self._close(calls)
        asked, receipts = await self._placed(calls, stop)
        if self._strategy is Strategy.AUTO and len(asked) > FANOUT_LIMIT:
            return await self._close(calls)
        told = await self._fan_out(asked, stop)
        return [*receipts, *_receipts(told)]

    async def _placed(
        self, calls: Sequence[CallRef], stop: float
    ) -> tuple[list[tuple[str, str]], list[AbortReceipt]]:
        """(worker, rid) for every POST to make, and receipts for workers that cannot be asked."""
        by_url: dict[str, list[str]] = {}
        asked: list[tuple[str, str]] = []
        for call in calls:
            if call.worker is not None:
                asked.append((call.worker, call.rid))
                continue
            for url in self._urls_of(call.rid):
                by_url.setdefault(url, []).append(call.rid)
        receipts: list[AbortReceipt] = []
        for url, rids in by_url.items():
            topology = await self._topologies.get(url, stop - anyio.current_time())
            asked.extend((worker, rid) for rid in rids for worker in topology.workers)
            receipts.extend(_unasked(topology, tuple(rids)))
        return list(dict.fromkeys(asked)), receipts

    def _urls_of(self, rid: str) -> Sequence[str]:
        """Where the stream of `rid` goes; every URL for a rid of an earlier process."""
        live = self._live.get(rid)
        if live is None:
            return self._topologies.urls
        live.aborts += 1
        if live.aborts > 1:  # the first abort did not end it: perhaps the worker is a new one
            self._topologies.doubt(live.url)
        return (live.url,)

    async def _fan_out(self, asked: Sequence[tuple[str, str]], stop: float) -> list[_Told]:
        rids: dict[str, list[str]] = {}
        for worker, rid in asked:
            rids.setdefault(worker, []).append(rid)

        async def tell(worker: str) -> list[_Told]:
            return await self._tell(worker, rids[worker], stop)

        told = [each for group in await spread(tell, list(rids), WORKERS_AT_ONCE) for each in group]
        if any(each.status is not ReceiptStatus.ACCEPTED for each in told):
            for url in self._topologies.urls:
                self._topologies.doubt(url)
        return told

    async def _tell(self, worker: str, rids: Sequence[str], stop: float) -> list[_Told]:
        """All aborts of one worker; once it did not answer, the rest is not sent."""
        failure: str | None = None

        async def post(rid: str) -> _Told:
            nonlocal failure
            if failure is not None:
                return _Told(worker, rid, ReceiptStatus.UNREACHABLE, failure, 0.0, sent=False)
            told = await self._post(worker, rid, {"rid": rid, "abort_all": False}, stop)
            if told.status is ReceiptStatus.UNREACHABLE:
                failure = told.detail
            return told

        return await spread(post, rids, AT_ONCE)

    async def _post(self, worker: str, rid: str, body: dict[str, object], stop: float) -> _Told:
        begun = anyio.current_time()
        detail: str | None
        try:
            reply = await self._asker.ask("POST", f"{worker}/abort_request", body, timeout=stop - begun)
        except NoAnswer as problem:
            status, detail = ReceiptStatus.UNREACHABLE, str(problem)
        else:
            status = ReceiptStatus.ACCEPTED if reply.ok else ReceiptStatus.REFUSED
            detail = None if reply.ok else reply.words()
        return _Told(worker, rid, status, detail, anyio.current_time() - begun)

    async def _close(self, calls: Sequence[CallRef]) -> list[AbortReceipt]:
        """Close our streams of `calls`; a stream that is over needs nothing."""
        by_worker: dict[str, list[str]] = {}
        begun = anyio.current_time()
        for call in calls:
            live = self._live.get(call.rid)
            if live is not None:
                await live.close()
                by_worker.setdefault(call.worker or live.url, []).append(call.rid)
        latency = anyio.current_time() - begun
        return [
            AbortReceipt(
                worker, ReceiptStatus.ACCEPTED, tuple(rids), "streams closed", Strategy.CLOSE, 0, latency
            )
            for worker, rids in by_worker.items()
        ]

    async def _everything(self, rids: tuple[str, ...], stop: float) -> list[AbortReceipt]:
        receipts: list[AbortReceipt] = []
        workers: dict[str, None] = {}
        for url in self._topologies.urls:
            topology = await self._topologies.get(url, stop - anyio.current_time())
            workers.update(dict.fromkeys(topology.workers))
            receipts.extend(_unasked(topology, rids))

        async def post(worker: str) -> AbortReceipt:
            told = await self._post(worker, "", {"abort_all": True}, stop)
            return AbortReceipt(worker, told.status, rids, told.detail, Strategy.ABORT_ALL, 1, told.latency)

        return [*receipts, *await spread(post, list(workers), WORKERS_AT_ONCE)]


def _unasked(topology: Topology, rids: tuple[str, ...]) -> list[AbortReceipt]:
    """Receipts for workers that are listed but cannot be asked, and for a router that lists none."""
    receipts = [
        AbortReceipt(worker, ReceiptStatus.UNREACHABLE, rids, "not an HTTP worker", Strategy.FANOUT, 0)
        for worker in topology.unusable
    ]
    if not topology.workers:
        receipts.append(
            AbortReceipt(
                topology.url,
                ReceiptStatus.UNREACHABLE,
                rids,
                "the router lists no workers",
                Strategy.FANOUT,
                0,
            )
        )
    return receipts


def _receipts(told: Sequence[_Told]) -> list[AbortReceipt]:
    groups: dict[tuple[str, ReceiptStatus, str | None], list[_Told]] = {}
    for each in told:
        groups.setdefault((each.worker, each.status, each.detail), []).append(each)
    return [
        AbortReceipt(
            worker,
            status,
            tuple(each.rid for each in group),
            detail,
            Strategy.FANOUT,
            sum(each.sent for each in group),
            max(each.latency for each in group),
        )
        for (worker, status, detail), group in groups.items()
    ]
