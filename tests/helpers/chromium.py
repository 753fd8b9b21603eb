"""Headless Chromium over its DevTools protocol: a page's log, network requests, rendering and values."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    return next((path for n in NAMES if (path := shutil.which(n))), None)


@contextlib.contextmanager
def started() -> Iterator[int]:
    """Start a browser with a fresh profile; yields the port of its DevTools."""
    profile = tempfile.mkdtemp(prefix="chromium-")
    flags = [
        "--headless=new",
        "--disable-gpu",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={profile}",
    ]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")
    process = subprocess.Popen(
        [find(), *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        output = Path(profile) / "DevToolsActivePort"
        give_up = time.monotonic() + 30
        while not (output.exists() and output.read_text().strip()):
            if time.monotonic() > give_up or process.poll() is not None:
                raise RuntimeError("chromium did not open its DevTools port")
            time.sleep(0.05)
        yield int(output.read_text().split()[0])
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(profile, ignore_errors=True)


class Page:
    """One tab. `requests`: requested URLs. `messages`: console output, exceptions and the browser's own messages."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.next_id = socket, 0
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.loaded = False

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.next_id += 1
        mine = self.next_id
        await self.socket.send_json({"id": mine, "method": method, "params": params})
        while True:
            event = await self.socket.receive_json(timeout=120)
            if event.get("id") == mine:
                if "error" in event:
                    raise RuntimeError(f"{method}: {event['error']}")
                return event["result"]
            self._handle_event(event)

    def _handle_event(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(str([a.get("value") for a in params["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.messages.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    async def open(self, url: str) -> float:
        """Load a page and return the seconds until its load event."""
        self.loaded, start = False, time.monotonic()
        await self.call("Page.navigate", url=url)
        while not self.loaded:
            self._handle_event(await self.socket.receive_json(timeout=60))
        return time.monotonic() - start

    async def evaluate(self, expression: str) -> Any:
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    async def view(self, width: int, dark: bool, height: int = 900) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: str | Path, whole: bool = True) -> None:
        result = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole
        )
        Path(path).write_bytes(base64.b64decode(result["data"]))


def browse(visit: Any) -> Any:
    """Run `async visit(page)` in a tab of a fresh browser and return its result."""
    import aiohttp

    async def session(port: int) -> Any:
        async with aiohttp.ClientSession() as client:
            async with client.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                target = (await answer.json())["webSocketDebuggerUrl"]
            async with client.ws_connect(target, max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Network", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                return await visit(page)

    with started() as port:
        return asyncio.run(session(port))
