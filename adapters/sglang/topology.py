"""Which workers stand behind a URL: asked once, remembered, asked again after a failure.

A router lists its workers (`/workers` from 0.2.2 on, `/list_workers` before); a server is told by `/model_info` or
`/server_info`. A 404 alone proves nothing: each probe's answer is kept and reported, and only an answer in the
right shape is believed. Facts: sglang-router 0.1.9 to 0.3.2, smg 1.9.0, SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import anyio

from adapters.sglang.asking import Asker, NoAnswer, Reply
from adapters.sglang.outgoing import base_url
from lifecycle.errors import ConfigurationError

ROUTER_PATHS = ("/workers", "/list_workers")
SERVER_PATHS = ("/model_info", "/server_info")
SERVER_KEYS = ("model_path", "served_model_name", "tokenizer_path", "weight_version")
REFRESH_S = 1.0
"""Seconds that a list of workers is trusted after it was fetched, whatever fails."""


class Finding(StrEnum):
    """What one probe found."""

    YES = "yes"
    NOT_FOUND = "404"
    NOT_ALLOWED = "405"
    UNAUTHORIZED = "unauthorized"
    NOT_IMPLEMENTED = "501"
    SERVER_ERROR = "server error"
    NO_JSON = "no JSON"
    OTHER_SHAPE = "another shape"
    OTHER_STATUS = "another status"
    TIMED_OUT = "no answer in time"
    UNREACHABLE = "unreachable"


STATUS_FINDINGS = {
    401: Finding.UNAUTHORIZED,
    403: Finding.UNAUTHORIZED,
    404: Finding.NOT_FOUND,
    405: Finding.NOT_ALLOWED,
    501: Finding.NOT_IMPLEMENTED,
}
ABSENT = frozenset({Finding.NOT_FOUND, Finding.NOT_ALLOWED, Finding.NOT_IMPLEMENTED})
"""Findings that say: this path is not served here."""


class Kind(StrEnum):
    """What a URL is."""

    ROUTER = "router"
    SERVER = "server"
    GIVEN = "given"  # the caller named the workers
    ASSUMED = "assumed"  # no probe could tell: taken for a server


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe and what came of it."""

    path: str
    finding: Finding
    detail: str | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.finding}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Topology:
    """The workers behind `url`, as base URLs, each once.

    `unusable` are listed workers that cannot be asked over HTTP (gRPC). `sure` is False while a probe that could
    have shown a router stayed without a clear answer; such a topology is not remembered.
    """

    url: str
    kind: Kind
    workers: tuple[str, ...]
    probes: tuple[Probe, ...] = ()
    unusable: tuple[str, ...] = ()

    @property
    def sure(self) -> bool:
        """Whether this can be relied on."""
        if self.kind is Kind.GIVEN:
            return True
        if self.kind is Kind.ROUTER:
            return bool(self.workers)
        asked = [probe.finding for probe in self.probes if probe.path in ROUTER_PATHS]
        return self.kind is Kind.SERVER and all(finding in ABSENT for finding in asked)

    @property
    def direct(self) -> bool:
        """Whether a request sent to `url` is served by `url` itself."""
        return self.workers == (self.url,) or (self.kind is Kind.GIVEN and self.url in self.workers)

    def report(self) -> str:
        """One line: what it is and how that is known."""
        found = f"{self.url} is {self.kind}, {len(self.workers)} workers"
        return "; ".join([found, *map(str, self.probes)])


async def discover(asker: Asker, url: str, timeout: float | None = None) -> Topology:
    """Find out what `url` is. Never raises for what a server does: what is unclear is in the probes."""
    probes: list[Probe] = []
    for path in (*ROUTER_PATHS, *SERVER_PATHS):
        finding, detail, data = await _probe(asker, url + path, timeout)
        if finding is Finding.YES and path in ROUTER_PATHS:
            listed = listed_workers(data)
            if listed is not None:
                workers, unusable = usable(listed)
                return Topology(url, Kind.ROUTER, workers, (*probes, Probe(path, finding)), unusable)
            finding, detail = Finding.OTHER_SHAPE, "no list of workers in it"
        elif finding is Finding.YES:
            if isinstance(data, dict) and any(key in data for key in SERVER_KEYS):
                return Topology(url, Kind.SERVER, (url,), (*probes, Probe(path, finding)))
            finding, detail = Finding.OTHER_SHAPE, "not what a server says of itself"
        probes.append(Probe(path, finding, detail))
        if finding is Finding.UNREACHABLE:
            break
    return Topology(url, Kind.ASSUMED, (url,), tuple(probes))


async def _probe(asker: Asker, url: str, timeout: float | None) -> tuple[Finding, str | None, Any]:
    try:
        reply = await asker.ask("GET", url, timeout=timeout)
    except NoAnswer as problem:
        return (Finding.TIMED_OUT if problem.timed_out else Finding.UNREACHABLE), str(problem), None
    return _read(reply)


def _read(reply: Reply) -> tuple[Finding, str | None, Any]:
    if not reply.ok:
        other = Finding.SERVER_ERROR if reply.status // 100 == 5 else Finding.OTHER_STATUS  # noqa: PLR2004
        return STATUS_FINDINGS.get(reply.status, other), reply.words(), None
    data = reply.json()
    if data is None:
        return Finding.NO_JSON, f"{reply.content_type or 'no content type'}: {reply.words()}", None
    return Finding.YES, None, data


def listed_workers(data: Any) -> list[str] | None:
    """The worker URLs in an answer of `/workers` or `/list_workers`, as listed; None if it is no such answer.

    Shapes: `{"urls": [str]}` (0.1.9, 0.2.1), `{"workers": [{"url", …}]}` (0.2.2 on; with `base_url` in a fork and
    `dp_base_url` in smg 1.9, which are preferred because they carry no rank).
    """
    if not isinstance(data, dict):
        return None
    urls = data.get("urls")
    if isinstance(urls, list) and all(isinstance(url, str) for url in urls):
        return urls
    workers = data.get("workers")
    if not isinstance(workers, list):
        return None
    found = [_worker_url(worker) for worker in workers]
    named = [url for url in found if url is not None]
    return named if len(named) == len(found) else None


def _worker_url(worker: Any) -> str | None:
    if isinstance(worker, str):
        return worker
    if isinstance(worker, dict):
        for key in ("base_url", "dp_base_url", "url"):
            value = worker.get(key)
            if isinstance(value, str) and value:
                return value
    return None


def usable(urls: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Base URLs without `@rank`, each once, and the URLs that cannot be asked over HTTP."""
    workers: dict[str, None] = {}
    unusable: dict[str, None] = {}
    for url in urls:
        try:
            workers[base_url(url)] = None
        except ConfigurationError:
            unusable[url.split("@")[0]] = None
    return tuple(workers), tuple(unusable)


@dataclass(slots=True)
class _Known:
    topology: Topology | None = None
    fetched: float = 0.0
    doubted: bool = False
    introduced: bool = False
    lock: anyio.Lock = field(default_factory=anyio.Lock)


class Topologies:
    """What is known about each URL. With `given` workers nothing is ever asked."""

    def __init__(self, asker: Asker, urls: Iterable[str], given: tuple[str, ...] | None = None) -> None:
        self.urls = tuple(urls)
        self._asker = asker
        self._known = {url: _Known() for url in self.urls}
        if given is not None:
            for url, known in self._known.items():
                known.topology = Topology(url, Kind.GIVEN, given)

    def known(self, url: str) -> Topology | None:
        """What is known about `url`, without asking."""
        return self._known[url].topology

    async def get(self, url: str, timeout: float | None = None) -> Topology:
        """What `url` is; asks if that is not known for sure, or in doubt.

        A router that does not answer just now keeps the workers it listed before: they may well be alive.
        """
        known = self._known[url]
        async with known.lock:
            before = known.topology
            if before is not None and before.sure and not known.doubted:
                return before
            found = await discover(self._asker, url, timeout)
            if before is not None and before.sure and not found.sure:
                found = replace(before, probes=found.probes)
            else:
                known.doubted = False
            known.topology = found
            known.fetched = anyio.current_time()
            return found

    async def introduce(self, url: str) -> None:
        """Find out what `url` is unless that was tried before; whoever comes meanwhile waits for the same answer."""
        known = self._known[url]
        async with known.lock:
            if known.topology is None and not known.introduced:
                known.introduced = True
                known.topology = await discover(self._asker, url)
                known.fetched = anyio.current_time()

    def doubt(self, url: str) -> None:
        """Something failed that a changed list of workers would explain: ask again next time, but not too often."""
        known = self._known[url]
        if known.topology is None or known.topology.kind is Kind.GIVEN:
            return
        if anyio.current_time() - known.fetched >= REFRESH_S:
            known.doubted = True
