"""Serves the report of runs to browsers of this machine; each request renders the page."""

from collections.abc import Callable, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from evenstep.tools.report.page import render
from evenstep.tools.report.read import read_run

HOST = "127.0.0.1"
_WATCHED = ("*.json", "*.jsonl", "*.toml")


def follow_runs(folders: Sequence[Path], say: Callable[[str], None]) -> None:
    """Serve the page of the runs in `folders` until Ctrl-C."""
    with server(folders) as serving:
        say(address_of(serving))
        try:
            serving.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return


def server(folders: Sequence[Path]) -> ThreadingHTTPServer:
    """Server of the page, on a free port."""
    for folder in folders:
        read_run(folder)  # raises here and not in a request
    made = ThreadingHTTPServer((HOST, 0), partial(_Handler, tuple(folders)))
    made.daemon_threads = True
    return made


def address_of(serving: ThreadingHTTPServer) -> str:
    return f"http://{HOST}:{serving.server_address[1]}/"


def _state(folders: Sequence[Path]) -> str:
    """Text that changes when a file of the runs does."""
    newest = 0
    size = 0
    for path in (path for folder in folders for pattern in _WATCHED for path in folder.glob(pattern)):
        try:
            status = path.stat()
        except OSError:
            continue  # replaced at this moment
        newest = max(newest, status.st_mtime_ns)
        size += status.st_size
    return f"{newest} {size}"


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, folders: Sequence[Path], *of_request: Any) -> None:
        self._folders = folders
        super().__init__(*of_request)  # which answers the request

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").partition(":")[0]
        if host not in (HOST, "localhost"):
            self.send_error(403)  # a foreign page whose name leads here must not read it
        elif self.path == "/":
            self._answer(render([read_run(folder) for folder in self._folders], live=True), "text/html")
        elif self.path == "/state":
            self._answer(_state(self._folders), "text/plain")
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: object) -> None: ...

    def _answer(self, text: str, kind: str) -> None:
        content = text.encode(errors="backslashreplace")
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        try:
            self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the browser has left
