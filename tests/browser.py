"""A headless Chromium for tests, spoken to over its DevTools pipe (NUL-terminated JSON on descriptors 3 and 4)."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--window-size=1200,900",
)
_SECONDS = 60
_PALE = r"""(() => {
  const parts = color => {
    const factor = color.startsWith("color(") ? 255 : 1;
    return color.match(/[\d.]+/g).map((part, n) => part * (n < 3 ? factor : 1));
  };
  const light = color => {
    const [r, g, b] = parts(color).map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const solid = color => { const found = parts(color); return found.length < 4 || found[3] > 0.5; };
  const ground = element => {
    for (let e = element; e; e = e.parentElement) {
      if (e.tagName === "svg") return null;
      const color = getComputedStyle(e).backgroundColor;
      if (solid(color)) return color;
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? "rgb(18, 18, 18)" : "rgb(255, 255, 255)";
  };
  const pale = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    const behind = own && element.checkVisibility() ? ground(element) : null;
    if (!behind) continue;
    const both = [light(getComputedStyle(element).color), light(behind)].sort((a, b) => b - a);
    const contrast = (both[0] + 0.05) / (both[1] + 0.05);
    const text = element.textContent.trim().slice(0, 30);
    if (contrast < LEAST) pale.push(`${contrast.toFixed(1)} ${element.tagName} ${text}`);
  }
  return pale;
})()"""
"""Texts on a ground they hardly differ from, by the contrast of WCAG 2: its ratio of relative luminance."""


class Browser:
    """One Chromium with one page. What the page throws, logs as an error or is refused is in `faults`."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._pending, self._number, self._session = b"", 0, ""
        self.faults: list[str] = []
        self._events: list[str] = []
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                found: dict[str, Any] = answer["result"]
                return found

    def open(self, path: Path) -> None:
        """Load a page from a file; faults of earlier pages are forgotten."""
        self.faults, self._events = [], []
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._next()

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def scheme(self, name: str) -> None:
        """Show pages as to somebody who prefers a `light` or a `dark` ground."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def pale_anywhere(self) -> list[str]:
        """Pale texts on both grounds; the page is redrawn for each, and light again in the end."""
        found = []
        for name in ("dark", "light"):
            self.scheme(name)
            found += [f"{name}: {text}" for text in self.pale()]
        return found

    def pale(self, least: float = 4.5) -> list[str]:
        """Texts of the page whose contrast with their ground is below `least`; those in pictures are left out."""
        found: list[str] = self.evaluate(_PALE.replace("LEAST", str(least)))
        return found

    def screenshot(self, path: Path) -> None:
        """What the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _next(self) -> dict[str, Any]:
        """The next message; faults and events are noted."""
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(self._receive, 1 << 20) if ready else b""
            assert chunk, f"Chromium said nothing for {_SECONDS} s, or ended"
            self._pending += chunk
        text, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        event, about = message.get("method", ""), message.get("params", {})
        self._events.append(event)
        if event == "Runtime.exceptionThrown":
            self.faults.append(json.dumps(about["exceptionDetails"])[:400])
        if event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.faults.append(json.dumps(about["args"])[:400])
        if event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.faults.append(about["entry"]["text"][:400])
        return message


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running Chromium; skips the test where none is installed."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no Chromium is installed (looked for {', '.join(NAMES)})")
    to_browser, from_test = os.pipe()
    to_test, from_browser = os.pipe()

    def wire() -> None:
        """In the child: the pipes become descriptors 3 and 4, whichever they were."""
        reading, writing = (fcntl.fcntl(pipe, fcntl.F_DUPFD, 16) for pipe in (to_browser, from_browser))
        os.dup2(reading, 3)
        os.dup2(writing, 4)

    with tempfile.TemporaryDirectory(prefix="dovetail-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=wire,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(from_test, to_test)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its helpers too
            process.wait()
            os.close(from_test)
            os.close(to_test)
