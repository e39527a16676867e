"""The floor: an asyncio stream reads the socket and looks at nothing but the last bytes."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

from benchmarks.clients.load import Load, Result, new_rid

LAST = b"data: [DONE]\n\n\r\n0\r\n\r\n"


async def stream(load: Load, url: str) -> Result:
    """One sample; there are no tokens, because nothing is parsed."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    body = json.dumps(load.body(new_rid())).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    end = b""
    while data := await reader.read(262_144):
        end = data[-len(LAST) :] if len(data) >= len(LAST) else (end + data)[-len(LAST) :]
        if end == LAST:
            break
    writer.close()
    if end != LAST:
        raise RuntimeError("the stream broke")
    return (), ()


async def run(load: Load) -> list[Result]:
    """All samples, one task each."""
    urls = [load.urls[number % len(load.urls)] for number in range(load.streams)]
    return await asyncio.gather(*(stream(load, url) for url in urls))
