"""Headless Chromium for tests: Debian's package, driven over the DevTools protocol. Never a downloaded browser."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class NoBrowser(Exception):
    """No Chromium is installed, and none can be."""


def find_chromium() -> str:
    """The path of Chromium; where it is missing and we are root on Debian, its package is installed."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-q"], check=False, stdout=subprocess.DEVNULL)
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium"]
        subprocess.run(install, check=False, stdout=subprocess.DEVNULL)
        found = shutil.which("chromium")
    if found is None:
        raise NoBrowser("no chromium: install Debian's package `chromium`")
    return found


class Tab:
    """One page in the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; what the page complains about meanwhile is kept."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = json.loads(await self._socket.receive_str())
            if message.get("id") == self._number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(params["entry"]["text"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", params)))
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in {
            "error",
            "warning",
            "assert",
        }:
            self.complaints.append(str(params["args"]))
        elif message["method"] == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
            "file:"
        ):
            self.complaints.append(f"asked the network for {params['request']['url']}")

    async def open(self, url: str, width: int, *, dark: bool = False) -> None:
        """Load a page at this width and wait until its script has run."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call("Page.navigate", url=url)
        ready = "document.documentElement?.dataset.ready"
        while await self.run(ready) != "yes":  # noqa: ASYNC110  another process gets ready
            await asyncio.sleep(0.02)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def photograph(self) -> bytes:
        """The whole page as PNG."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Tab]:
    """A browser with a profile of its own and one tab."""
    process = await asyncio.create_subprocess_exec(
        find_chromium(),
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        port = await _port(process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [target for target in await answer.json() if target["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await process.communicate()


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async for line in process.stderr:
        if b"DevTools listening on ws://" in line:
            return int(line.decode().split("127.0.0.1:")[1].split("/")[0])
    raise AssertionError("chromium ended before it listened")
