"""A headless Chromium for tests, spoken to through a pipe: no driver, no port, no package."""

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """Return the program of a browser that can be had here."""
    named = os.environ.get("CHROME")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page in the browser, and what was said and asked for while it was open."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something and return its answer; note what happens meanwhile."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._reading, 1 << 16)
            assert chunk, "the browser ended"
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        kind, content = event.get("method"), event.get("params", {})
        if kind == "Network.requestWillBeSent":
            self.requests.append(content["request"]["url"])
        elif kind == "Runtime.exceptionThrown":
            self.complaints.append(content["exceptionDetails"]["text"])
        elif kind == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(content["args"]))
        elif kind == "Log.entryAdded":
            self.complaints.append(content["entry"]["text"])

    def open(self, path: Path | str, width: int, height: int, dark: bool = False) -> None:
        """Show a file, or what an address gives, as a window of this width would."""
        self.complaints, self.requests = [], []
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        url = path if isinstance(path, str) else path.resolve().as_uri()
        self.call("Page.navigate", url=url)
        while self.ask("document.readyState") != "complete":
            pass
        self.ask("new Promise(done => setTimeout(() => done(1), 100))")

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Save a picture of the whole page."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def started(program: str) -> Iterator[Page]:
    """Yield an empty page of a browser that ends with the block."""
    to_browser, from_browser = os.pipe(), os.pipe()

    def connect() -> None:
        # The browser reads from descriptor 3 and writes to 4, whatever they were before.
        reading, writing = os.dup(to_browser[0]), os.dup(from_browser[1])
        os.dup2(reading, 3)
        os.dup2(writing, 4)

    # Processes of a browser may still write into its profile when it has been told to end.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                program,
                *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
                *("--no-first-run", "--disable-extensions", f"--user-data-dir={profile}"),
                *("--disable-dev-shm-usage", "--disable-quic", "--disable-sync"),
                *("--disable-background-networking", "--disable-component-update"),
                "about:blank",
            ],
            preexec_fn=connect,
            start_new_session=True,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        page = Page(from_browser[0], to_browser[1])
        try:
            target = page.call("Target.createTarget", url="about:blank")["targetId"]
            attached = page.call("Target.attachToTarget", targetId=target, flatten=True)
            page.session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            yield page
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # It is a group of its own.
            process.wait()
            os.close(to_browser[1])
            os.close(from_browser[0])
