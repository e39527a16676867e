"""Today's practice: one httpx client for all streams, `aiter_lines`, `json.loads`, lists built anew from each chunk.

Written anew after what streaming loops of RL frameworks do (slime's was read): a client with `max_connections` and no
time-out, `[DONE]` skipped and not a reason to stop, the sample brought up to date with every chunk.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import httpx

from benchmarks.clients.load import Load, Result, new_rid


@dataclass
class Sample:
    """What a framework keeps of a sample."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    response: str = ""


async def stream(client: httpx.AsyncClient, load: Load, url: str) -> Result:
    """One sample."""
    sample = Sample()
    async with client.stream("POST", f"{url}/generate", json=load.body(new_rid())) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[len("data:") :].strip()
            if data == "[DONE]":
                continue
            chunk = json.loads(data)
            meta = chunk["meta_info"]
            tokens = [item[1] for item in meta["output_token_logprobs"]]
            logprobs = [item[0] for item in meta["output_token_logprobs"]]
            if len(tokens) == meta["completion_tokens"]:
                sample.tokens, sample.logprobs, sample.response = tokens, logprobs, chunk["text"]
            else:
                sample.tokens += tokens
                sample.logprobs += logprobs
                sample.response += chunk["text"]
    return sample.tokens, sample.logprobs


async def run(load: Load) -> list[Result]:
    """All samples, one task each."""
    limits = httpx.Limits(max_connections=load.streams)
    async with httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None)) as client:
        urls = [load.urls[number % len(load.urls)] for number in range(load.streams)]
        return await asyncio.gather(*(stream(client, load, url) for url in urls))
