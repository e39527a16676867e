"""A server that costs as little as it can: prebuilt chunks in SGLang's shape over asyncio, in a process of its own.

    python -m benchmarks.server --mode incremental --tokens 500 [--rate 40] [--workers 4]

It prints its URLs as a JSON list and serves until its standard input closes. Every token is one chunk and one write.
Without `--rate` each stream has a task that writes and gives way to the others, as fast as that goes; with it all
streams move in step, that often per second, as a decode batch does. A body with `"together": n` waits until n such requests have come. `/abort_request` ends
a stream at once, as a worker does that runs it; `GET /aborts` says how many such requests came.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RID_LENGTH = 32
MARK = "#" * RID_LENGTH
HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: prebuilt\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
LAST = b"0\r\n\r\n"
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}

Piece = tuple[bytes, bytes]  # what stands before and behind the rid


@dataclass(frozen=True, slots=True)
class Sample:
    """The one sample that every stream brings."""

    ids: list[int]
    logprobs: list[float]
    words: list[str]


def sample(tokens: int) -> Sample:
    """Token ids, logprobs of float32 precision in 16 to 18 digits, and a text of 4 characters a token."""
    source = random.Random(8)
    ids = [source.randrange(151_000) for _ in range(tokens)]
    logprobs = [-source.expovariate(1.0) for _ in range(tokens)]
    words = ["".join(source.choices("etaoinshrdlu ", k=4)) for _ in range(tokens)]
    return Sample(ids, logprobs, words)


def framed(payload: Any) -> bytes:
    """One SSE event in one HTTP chunk."""
    text = payload if isinstance(payload, str) else json.dumps(payload, separators=(",", ":"))
    event = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def chunk(of: Sample, count: int, total: int, *, incremental: bool, finish: Any = None) -> bytes:
    """The chunk after `count` tokens, key by key in the order of SGLang 0.5.23."""
    first = count - 1 if incremental else 0
    if finish is None and count == total:
        finish = {"type": "length", "length": total}
    elif finish is not None and incremental:
        first = count
    meta = {
        "id": MARK,
        "finish_reason": finish,
        "prompt_tokens": 16,
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [
            [logprob, token, None]
            for logprob, token in zip(of.logprobs[first:count], of.ids[first:count], strict=True)
        ],
        "output_token_logprobs_length": count,
        "reasoning_tokens": 0,
        "completion_tokens": count,
        "cached_tokens": 0,
    }
    if finish is not None:
        meta["weight_versions"] = [{"version": "default", "start": 0, "end": count}]
    meta |= {"cached_tokens_details": None, "dp_rank": None}
    if finish is not None:
        meta["e2e_latency"] = 1.25
    text = "".join(of.words[first:count])
    return framed({"text": text, "output_ids": of.ids[first:count], "meta_info": meta})


def pieces(tokens: int, *, incremental: bool) -> list[Piece]:
    """Every chunk of a stream, cut at the rid."""
    of = sample(tokens)
    mark = MARK.encode()
    made = []
    for count in range(1, tokens + 1):
        before, _, after = chunk(of, count, tokens, incremental=incremental).partition(mark)
        made.append((before, after))
    return made


class Server:
    """The streams of all workers, and the task that feeds them."""

    def __init__(self, tokens: int, rate: float | None, *, incremental: bool) -> None:
        self.tokens = tokens
        self.incremental = incremental
        self.rate = rate
        self.sample = sample(tokens)
        self.pieces = pieces(tokens, incremental=incremental)
        self.active: set[Connection] = set()
        self.waiting: list[Connection] = []
        self.wake = asyncio.Event()
        self.aborts = 0  # requests, over all workers

    def start(self, connection: Connection, together: int) -> None:
        """Begin a stream, at once or when enough others wait."""
        self.waiting.append(connection)
        if len(self.waiting) >= together or together <= 1:
            for each in self.waiting:
                self.begin(each)
            self.waiting.clear()

    def begin(self, connection: Connection) -> None:
        """Send a stream, with a task of its own or in step with all others."""
        if self.rate is None:
            connection.task = asyncio.get_running_loop().create_task(connection.send())
        else:
            self.active.add(connection)
            self.wake.set()

    def stop(self, connection: Connection) -> None:
        """A stream is over."""
        self.active.discard(connection)
        if connection in self.waiting:
            self.waiting.remove(connection)

    async def feed(self) -> None:
        """With a rate: one chunk a stream and round, for ever."""
        assert self.rate is not None
        loop = asyncio.get_running_loop()
        while True:
            if not self.active:
                self.wake.clear()
                await self.wake.wait()
                due = loop.time()
            for connection in list(self.active):
                connection.step()
            due = max(due + 1 / self.rate, loop.time() - 1.0)
            await asyncio.sleep(max(0.0, due - loop.time()))


class Connection(asyncio.Protocol):
    """One client's connection: requests in, prebuilt answers out."""

    def __init__(self, server: Server, streams: dict[str, Connection]) -> None:
        self.server = server
        self.streams = streams
        self.buffer = b""
        self.rid = ""
        self.mark = b""
        self.at = 0
        self.end = 0
        self.blocked = False
        self.room = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def pause_writing(self) -> None:
        self.blocked = True
        self.room.clear()

    def resume_writing(self) -> None:
        self.blocked = False
        self.room.set()

    def connection_lost(self, _problem: Exception | None) -> None:
        self.over()
        self.transport = None
        self.room.set()

    def over(self) -> None:
        self.server.stop(self)
        self.streams.pop(self.rid, None)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (stop := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:stop]
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.strip().lower() == b"content-length":
                    length = int(value)
            if len(self.buffer) < stop + 4 + length:
                return
            body = self.buffer[stop + 4 : stop + 4 + length]
            self.buffer = self.buffer[stop + 4 + length :]
            method, path, _ = head.split(b" ", 2)
            self.request(f"{method.decode()} {path.decode()}", body)

    def request(self, line: str, body: bytes) -> None:
        if line == "POST /generate":
            self.generate(json.loads(body))
        elif line == "POST /abort_request":
            self.reply(200, b"")
            self.server.aborts += 1
            other = self.streams.get(json.loads(body).get("rid", ""))
            if other is not None:
                other.abort()
        elif line in ("GET /model_info", "GET /server_info"):
            self.reply(200, b'{"model_path":"prebuilt","weight_version":"default"}')
        elif line == "GET /aborts":
            self.reply(200, b"%d" % self.server.aborts)
        else:
            self.reply(404, b'{"detail":"Not Found"}')

    def reply(self, status: int, body: bytes) -> None:
        assert self.transport is not None
        words = {200: "OK", 400: "Bad Request", 404: "Not Found"}[status]
        head = f"HTTP/1.1 {status} {words}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def generate(self, body: dict[str, Any]) -> None:
        wanted = body["sampling_params"]["max_new_tokens"]
        if len(body["rid"]) != RID_LENGTH or wanted != self.server.tokens:
            self.reply(400, json.dumps({"error": f"needs {self.server.tokens} tokens"}).encode())
            return
        assert self.transport is not None
        self.rid, self.at, self.end = body["rid"], 0, self.server.tokens
        self.mark = self.rid.encode()
        self.streams[self.rid] = self
        self.transport.write(HEAD)
        self.server.start(self, body.get("together", 0))

    async def send(self) -> None:
        """Every chunk with a write of its own, others' in between, as any asyncio server does it."""
        while self.streams.get(self.rid) is self:
            self.step()
            if self.blocked:
                await self.room.wait()
            else:
                await asyncio.sleep(0)

    def step(self) -> None:
        """Write the next chunk, if the socket takes it."""
        if self.blocked or self.transport is None:
            return
        before, after = self.server.pieces[self.at]
        self.at += 1
        if self.at < self.end:
            self.transport.write(b"".join((before, self.mark, after)))
        else:
            self.transport.write(b"".join((before, self.mark, after, framed("[DONE]"), LAST)))
            self.over()

    def abort(self) -> None:
        """End the stream as a worker ends a running request."""
        if self.transport is None:
            return
        last = chunk(
            self.server.sample, self.at, self.end, incremental=self.server.incremental, finish=ABORTED
        )
        self.transport.write(last.replace(MARK.encode(), self.mark) + framed("[DONE]") + LAST)
        self.over()


def raise_file_limit() -> None:
    """As many open files as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(given: argparse.Namespace, say: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    server = Server(given.tokens, given.rate, incremental=given.mode == "incremental")
    urls = []
    for _ in range(given.workers):
        streams: dict[str, Connection] = {}
        listener = await loop.create_server(
            lambda streams=streams: Connection(server, streams), "127.0.0.1", 0, backlog=8192
        )
        urls.append(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    feeding = None if given.rate is None else asyncio.create_task(server.feed())
    closed = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), lambda: closed.set() if not sys.stdin.buffer.read1(1) else None)
    say(json.dumps(urls))
    await closed.wait()
    if feeding is not None:
        feeding.cancel()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Serve prebuilt chunks until standard input closes.")
    parser.add_argument("--mode", choices=("incremental", "cumulative"), default="incremental")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--rate", type=float, help="rounds per second; as fast as it goes if left out")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    raise_file_limit()
    asyncio.run(serve(given, lambda text: print(text, flush=True)))


if __name__ == "__main__":
    main()
