"""Reading a stepped brain in tests."""

from __future__ import annotations

import json
from typing import Any

from adapters.sglang.simulator import Brain, Mark, Request

PROMPT = [39, 68, 75]


def body(rid: str = "r", count: int = 6, **fields: Any) -> dict[str, Any]:
    """A streaming request; ``sampling`` adds sampling parameters."""
    sampling = {"max_new_tokens": count, **fields.pop("sampling", {})}
    return {
        "rid": rid,
        "input_ids": PROMPT,
        "stream": True,
        "return_logprob": True,
        "sampling_params": sampling,
        **fields,
    }


class Reader:
    """Collects what a stream says."""

    def __init__(self, brain: Brain, request: Request) -> None:
        self.brain = brain
        self.request = request
        self.chunks: list[dict[str, Any]] = []
        self.raw = b""
        self.done = False
        self.mark: Mark | None = None

    def poll(self) -> None:
        """Read what is there now."""
        for part in self.brain.poll(self.request):
            if isinstance(part, Mark):
                self.mark = part
                continue
            self.raw += part
            if part == b"data: [DONE]\n\n":
                self.done = True
            elif self.request.stream and part.endswith(b"\n\n"):
                try:
                    self.chunks.append(json.loads(part[6:]))
                except ValueError:
                    self.chunks.append({"broken": part})

    def finish(self, steps: int = 1000) -> Reader:
        """Step and read until the response has ended."""
        for _ in range(steps):
            self.poll()
            if self.mark is not None:
                return self
            self.brain.step()
        raise AssertionError("the response did not end")

    @property
    def meta(self) -> dict[str, Any]:
        """``meta_info`` of the last chunk."""
        meta: dict[str, Any] = self.chunks[-1]["meta_info"]
        return meta


def submit(brain: Brain, rid: str = "r", count: int = 6, **fields: Any) -> Reader:
    """A reader of a new request."""
    return Reader(brain, brain.submit(body(rid, count, **fields)))


def expected(brain: Brain, count: int, prompt: list[int] = PROMPT) -> list[int]:
    """The tokens that the model says."""
    return [sample.token for sample in brain.model.continuation(prompt, count)]
