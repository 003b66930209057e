"""The report of a run that goes on, served to browsers on this machine and to nobody else.

One address, which gives the page as it stands and asks browsers to come back every few seconds
until the runs are done. Nothing is written, and nothing but the page can be asked for.
"""

import sys
from collections.abc import Callable, Sequence
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from sizewise.errors import ConfigError, NothingToShow, SizewiseError
from sizewise.report import page, records

LOOPBACK = "127.0.0.1"

EVERY = 10
"""Seconds after which a browser asks again."""


class Watch:
    """The page of some folders, made anew when something has been added to them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = Lock()  # Browsers may ask several times at once.
        self._seen: object = None
        self._made = ""

    def page(self) -> str:
        """Return the page as it stands.

        Raises:
            CheckpointError: A folder is neither a run nor a comparison.
        """
        with self._lock:
            seen = self._state()
            if seen != self._seen:
                self._made, self._seen = self._make(), seen
            return self._made

    def _state(self) -> object:
        logs = ("history.jsonl", "result.json", records.COMPARISON)
        folders = [one for folder in self._folders for one in (folder, *records.under_way(folder))]
        paths = [folder / name for folder in folders for name in logs]
        return [(path, path.stat().st_mtime_ns) for path in paths if path.exists()]

    def _make(self) -> str:
        try:
            runs = records.read(self._folders)
        except NothingToShow as error:
            said = '<header><p class="kicker sans">sizewise report</p><h1>Waiting</h1></header>'
            said += f"<p>{escape(str(error).partition(';')[0])}.</p>"
            return page.document("Waiting", said, EVERY)
        done = all(run.result for run in runs) and not any(map(records.under_way, self._folders))
        return page.html(runs, records.failures(self._folders), None if done else EVERY)


def serve(
    folders: Sequence[Path], port: int = 0, tell: Callable[[str], None] = lambda address: None
) -> None:
    """Serve the report of some folders on this machine until an interrupt.

    Args:
        folders: Runs and comparisons, which may be under way.
        port: On which port; 0: any that is free.
        tell: Called with the address once it can be asked for.

    Raises:
        CheckpointError: A folder is neither a run nor a comparison.
        ConfigError: The port is taken.
    """
    watch = Watch(folders)
    watch.page()  # What is no run is told now, not to a browser.
    try:
        server = _Server((LOOPBACK, port), _Handler)
    except OSError as error:
        raise ConfigError(
            f"port {port} of this machine cannot be used: {error}; choose another, or 0 for any"
        ) from None
    server.watch = watch
    with server:
        tell(f"http://{LOOPBACK}:{server.server_port}/")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    watch: Watch

    def handle_error(self, request: object, client_address: object) -> None:
        """Let browsers hang up as they like."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    """Answers with the page, to those who ask this machine by its own name."""

    server: _Server
    server_version, sys_version = "sizewise", ""

    def do_GET(self) -> None:
        """Send the page."""
        # A name that somebody else made to point here is refused: its pages could read the answer.
        names = {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}
        if self.headers.get("Host") not in names:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            try:
                content = self.server.watch.page().encode()
            except SizewiseError as error:  # Its folder has gone.
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            else:
                self._answer(content)

    def _answer(self, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": page.POLICY,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a terminal is for what people asked for."""
