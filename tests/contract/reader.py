"""A plain reader of SGLang streams for the contract tests: httpx and json, nothing of the project.

It keeps the chunks as they came, so that a test can look at keys, and puts tokens together by lengths alone.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx


@dataclass
class Subject:
    """A server under contract: where it is and how it was started."""

    name: str
    url: str
    incremental: bool
    max_running_requests: int
    version: str
    client: httpx.Client = field(repr=False)
    tag: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Begins every rid of a test. A rid must not be used again within 2 s: see ``test_a_rid_used_again_at_once``."""

    def rid(self, name: str) -> str:
        """The rid of this test's request ``name``."""
        return f"{self.tag}-{name}"

    def post(self, path: str, body: Any = None) -> httpx.Response:
        """A control call."""
        return self.client.post(self.url + path, json={} if body is None else body)

    def get(self, path: str) -> httpx.Response:
        """A read-only call."""
        return self.client.get(self.url + path)

    def load(self) -> tuple[int, int]:
        """Running and waiting requests."""
        load = self.get("/v1/loads?include=core").json()["loads"][0]
        return load["num_running_reqs"], load["num_waiting_reqs"]

    def wait_for_load(self, running: int | None, waiting: int | None, seconds: float = 15.0) -> None:
        """Poll until the server reports these numbers; None: any."""
        deadline = time.monotonic() + seconds
        while True:
            seen = self.load()
            if running in (None, seen[0]) and waiting in (None, seen[1]):
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"load (running, waiting) is {seen}, expected {(running, waiting)}")
            time.sleep(0.02)  # poll interval; the deadline above decides

    def body(self, name: str | None = None, count: int = 16, **fields: Any) -> dict[str, Any]:
        """A greedy streaming request over a fixed prompt; ``fields`` override top-level keys and ``sampling_params``."""
        sampling = {
            "max_new_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            **fields.pop("sampling", {}),
        }
        body: dict[str, Any] = {
            "input_ids": [39, 68, 75, 75, 78],
            "stream": True,
            "return_logprob": True,
            "sampling_params": sampling,
            **fields,
        }
        return body if name is None else {"rid": self.rid(name), **body}

    def stream(self, name: str | None = None, count: int = 16, **fields: Any) -> Stream:
        """Open a stream; use it as a context manager."""
        return Stream(self, self.body(name, count, **fields))

    def complete(self, name: str | None = None, count: int = 16, **fields: Any) -> Stream:
        """A whole stream, read to its end."""
        with self.stream(name, count, **fields) as stream:
            return stream.read()

    @contextmanager
    def streams(self, *opened: Stream) -> Iterator[list[Stream]]:
        """Several streams at once."""
        with ExitStack() as stack:
            yield [stack.enter_context(stream) for stream in opened]


class Stream:
    """One response: its chunks so far, and the tokens they add up to."""

    def __init__(self, subject: Subject, body: dict[str, Any]) -> None:
        self._subject = subject
        self._body = body
        self.chunks: list[dict[str, Any]] = []
        self.pairs: list[list[Any]] = []
        self.done = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        url = self._subject.url + "/generate"
        self.response = self._stack.enter_context(
            self._subject.client.stream("POST", url, json=self._body, timeout=httpx.Timeout(20.0))
        )
        self._lines = self.response.iter_lines()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def next(self) -> dict[str, Any] | None:
        """The next chunk, or None at the end of the stream."""
        for line in self._lines:
            if not line.startswith("data: "):
                assert line == "", f"not an SSE data line: {line!r}"
                continue
            if line == "data: [DONE]":
                self.done = True
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            self.chunks.append(chunk)
            if "meta_info" in chunk:
                self._take(chunk["meta_info"])
            return chunk
        return None

    def _take(self, meta: dict[str, Any]) -> None:
        """Put the tokens together, by lengths only: whole so far, or just what is new."""
        pairs, count = meta["output_token_logprobs"], meta["completion_tokens"]
        if len(pairs) > count:  # an abort in the queue of an incremental server repeats everything
            pairs = pairs[-count:] if count else []
        if len(pairs) == count:
            assert pairs[: len(self.pairs)] == self.pairs
            self.pairs = pairs
        else:
            assert len(self.pairs) + len(pairs) == count
            self.pairs = self.pairs + pairs

    def read(self, tokens: int | None = None) -> Self:
        """Read to the end, or until at least this many tokens are there."""
        while tokens is None or len(self.pairs) < tokens:
            if self.next() is None:
                assert tokens is None, f"the stream ended after {len(self.pairs)} of {tokens} tokens"
                break
        return self

    @property
    def tokens(self) -> list[int]:
        """Output ids so far."""
        return [pair[1] for pair in self.pairs]

    @property
    def logprobs(self) -> list[float]:
        """Their logprobs."""
        return [pair[0] for pair in self.pairs]

    @property
    def meta(self) -> dict[str, Any]:
        """``meta_info`` of the last chunk."""
        meta: dict[str, Any] = self.chunks[-1]["meta_info"]
        return meta

    @property
    def finish(self) -> dict[str, Any]:
        """The finish reason of the last chunk."""
        reason: dict[str, Any] = self.meta["finish_reason"]
        return reason
