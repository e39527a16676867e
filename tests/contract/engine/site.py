"""An engine over a server or a router, and what the tests need beside it: a plain look at the servers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from adapters.sglang import SGLangBackend
from lifecycle.engine import LifecycleEngine
from lifecycle.engine.handle import RolloutHandle
from lifecycle.log.records import RolloutTransition
from lifecycle.policy import Policy
from lifecycle.request import RolloutRequest
from lifecycle.snapshot import Snapshot
from tests.support.driving import Lines

PROMPT = (39, 68, 75, 75, 78)
TEXT = "Hello"
"""The text of ``PROMPT``, for the byte-level tokenizers of simulator and tiny model."""
LONG = 6000
"""Tokens of a rollout that is to be interrupted: more than a server makes in any test."""
REST = 40
"""Tokens that a resume must at least make."""
BLOCK = 64
DEADLINE = 55.0
"""Seconds for all that one test does with an engine."""
TOLERANCE = 1e-5
"""By how much logprobs of a resumed run may differ: another prefill sums in another order."""
POLL = 0.02
LEAK_DEADLINE = 6.0
"""Seconds in which a server must have dropped what a test left; less than it needs for ``LONG`` tokens."""


@dataclass(frozen=True)
class Answer:
    """What a server says in one piece, without a stream and without an engine."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Site:
    """``url`` is where an engine sends to, ``workers`` the servers behind it, ``limit`` what each runs at once.

    ``version`` is that of SGLang on the workers.
    """

    name: str
    url: str
    workers: tuple[str, ...]
    limit: int
    version: str
    client: httpx.Client = field(repr=False)
    answers: dict[Sequence[int], Answer] = field(default_factory=dict, repr=False)

    @classmethod
    def over(cls, name: str, url: str, workers: Sequence[str], client: httpx.Client) -> Site:
        """The site with what its first worker says of itself."""
        info = client.get(f"{workers[0]}/server_info").json()
        return cls(name, url, tuple(workers), info["max_running_requests"], info["version"], client)

    @property
    def routed(self) -> bool:
        """Whether there is a router in between."""
        return self.workers != (self.url,)

    # -- the servers, seen without an engine -------------------------------------------------------------------

    def post(self, path: str, body: dict[str, Any] | None = None) -> list[httpx.Response]:
        """The same control call to every worker."""
        return [self.client.post(worker + path, json=body or {}) for worker in self.workers]

    def versions(self) -> set[str]:
        """The weight labels of the workers."""
        return {self.client.get(f"{worker}/model_info").json()["weight_version"] for worker in self.workers}

    def loads(self) -> list[tuple[int, int]]:
        """Running and waiting requests of each worker."""
        found = [
            self.client.get(f"{worker}/v1/loads?include=core").json()["loads"] for worker in self.workers
        ]
        return [(load["num_running_reqs"], load["num_waiting_reqs"]) for (load,) in found]

    def wait_for_loads(self, good: Callable[[list[tuple[int, int]]], bool], seconds: float = 15.0) -> None:
        """Poll until the loads are as wanted."""
        deadline = time.monotonic() + seconds
        while not good(loads := self.loads()):
            assert time.monotonic() < deadline, f"loads (running, waiting) of the workers: {loads}"
            time.sleep(POLL)  # poll interval; the deadline above decides

    def is_empty(self) -> None:
        """Wait until nothing runs or waits on any worker."""
        self.wait_for_loads(lambda loads: not any(map(any, loads)), LEAK_DEADLINE)

    def answer(self, prompt: Sequence[int], count: int) -> Answer:
        """The first tokens of the uninterrupted greedy answer, from the first worker: all have the same weights."""
        known = self.answers.get(prompt)
        if known is None or len(known.tokens) < count:
            size = -(-count // BLOCK) * BLOCK
            sampling = {"temperature": 0, "max_new_tokens": size, "ignore_eos": True}
            body = {"input_ids": list(prompt), "return_logprob": True, "sampling_params": sampling}
            found = self.client.post(f"{self.workers[0]}/generate", json=body, timeout=DEADLINE).json()
            pairs = found["meta_info"]["output_token_logprobs"]
            known = self.answers[prompt] = Answer([pair[1] for pair in pairs], [pair[0] for pair in pairs])
        return Answer(known.tokens[:count], known.logprobs[:count])

    @asynccontextmanager
    async def full(self, rid: str | None = None) -> AsyncIterator[None]:
        """Every worker runs as much as it can, or just ``rid``, for somebody else, who must not notice what we do."""
        sampling = {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True}
        body = {"input_ids": list(PROMPT), "stream": True, "sampling_params": sampling}
        body |= {} if rid is None else {"rid": rid}
        count = self.limit if rid is None else 1
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        ended: list[str] = []

        async def read(client: httpx.AsyncClient, worker: str) -> None:
            async with client.stream("POST", f"{worker}/generate", json=body) as response:
                async for _ in response.aiter_raw():
                    pass
            ended.append(worker)

        async with (
            httpx.AsyncClient(limits=limits, timeout=DEADLINE) as client,
            anyio.create_task_group() as tasks,
        ):
            for worker in self.workers:
                for _ in range(count):
                    tasks.start_soon(read, client, worker)
            await self.until_loads(lambda loads: all(running == count for running, _ in loads))
            yield
            tasks.cancel_scope.cancel()
        assert not ended, f"requests of somebody else ended early on {ended}"

    async def until_loads(self, good: Callable[[list[tuple[int, int]]], bool]) -> None:
        """``wait_for_loads`` that leaves the event loop alone."""
        await anyio.to_thread.run_sync(self.wait_for_loads, good)

    async def until_queued(self, count: int) -> None:
        """Wait until so many requests wait in front of full workers."""
        await self.until_loads(lambda loads: sum(waiting for _, waiting in loads) == count)

    # -- an engine over them -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def engine(
        self,
        *,
        urls: str | Sequence[str] | None = None,
        strategy: str = "auto",
        transport: str = "auto",
        client: httpx.AsyncClient | None = None,
        random: Random | None = None,
        **settings: Any,
    ) -> AsyncIterator[LifecycleEngine]:
        """An engine whose log and books are checked when it has closed."""
        lines = Lines()
        settings.setdefault("policy", Policy(backoff_initial=0.05, backoff_max=0.5))
        with anyio.fail_after(DEADLINE):
            async with (
                SGLangBackend(
                    urls or self.url, strategy=strategy, transport=transport, client=client
                ) as backend,
                LifecycleEngine(backend, log=lines, random=random, **settings) as engine,  # type: ignore[arg-type]
            ):
                yield engine
                books = engine.ledger()
            assert books.balanced, books
        for rollout_id in {line["rollout_id"] for line in lines.of(RolloutTransition)}:
            lines.walk(rollout_id)

    def request(self, name: str = "a", count: int = LONG, **fields: Any) -> RolloutRequest:
        """A greedy request for ``count`` tokens; ``sampling`` is merged into its sampling parameters."""
        sampling = {"temperature": 0, "ignore_eos": True, **fields.pop("sampling", {})}
        if "text" not in fields:
            fields.setdefault("prompt_ids", PROMPT)
        return RolloutRequest(id=name, max_new_tokens=count, sampling_params=sampling, **fields)

    def check(self, snapshot: Snapshot) -> None:
        """All tokens, or as many as are held, are those of the uninterrupted answer, and so nearly are the logprobs."""
        held = len(snapshot.tokens)
        assert held == snapshot.request.max_new_tokens or not snapshot.final
        expected = self.answer(snapshot.prompt_ids or (), held)
        assert snapshot.tokens.tolist() == expected.tokens
        assert snapshot.logprobs.tolist() == pytest.approx(expected.logprobs, abs=TOLERANCE)

    async def goes_on(self, engine: LifecycleEngine, kept: Snapshot) -> Snapshot:
        """Resume what was interrupted, until it has more tokens, and hold all of them against the whole answer."""
        handle = engine.submit(kept)
        await grown(handle, len(kept.tokens) + REST)
        await handle.abort()
        longer = await handle.wait()
        assert len(longer.attempts) == len(kept.attempts) + 1
        assert longer.attempts[-1].start == len(kept.tokens)
        self.check(longer)
        return longer


async def grown(handle: RolloutHandle, tokens: int) -> None:
    """Wait until a rollout holds so many tokens, and is still running."""
    async with aclosing(handle.updates()) as updates:
        async for snapshot in updates:
            if len(snapshot.tokens) >= tokens:
                assert not handle.at_rest, (
                    f"it came to rest at {len(snapshot.tokens)} tokens: {snapshot.reason}"
                )
                return
    raise AssertionError(f"it ended with {len(handle.rollout.tokens)} of {tokens} tokens: {handle.state}")


async def until(condition: Callable[[], object]) -> None:
    """Look at something each time the loop comes round; the engine's deadline bounds it."""
    while not condition():
        await anyio.lowlevel.checkpoint()
