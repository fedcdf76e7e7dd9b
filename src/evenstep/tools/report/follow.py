"""Serves the report of runs to this machine alone, made again whenever their files change."""

from collections.abc import Callable, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any, final
from zlib import crc32

from evenstep.tools.report.page import render
from evenstep.tools.report.run import read_run

HOST = "127.0.0.1"
_WATCHED = ("*.json", "*.jsonl", "*.toml", "*.csv", "checkpoints/*/manifest.json")


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
    made = ThreadingHTTPServer((HOST, 0), partial(_Handler, FollowedPage(folders)))
    made.daemon_threads = True
    return made


def address_of(serving: ThreadingHTTPServer) -> str:
    return f"http://{HOST}:{serving.server_address[1]}/"


@final
class FollowedPage:
    """Page of runs, made when it is asked for and their files have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._lock = Lock()
        self._state, self._text = "", ""
        self.text()

    def state(self) -> str:
        """Digest of names, times and sizes of the files."""
        digest = 0
        for folder in self._folders:
            for pattern in _WATCHED:
                for path in sorted(folder.glob(pattern)):
                    try:
                        status = path.stat()
                    except OSError:
                        continue  # replaced at this moment
                    digest = crc32(f"{path!r} {status.st_mtime_ns} {status.st_size}".encode(), digest)
        return f"{digest:08x}"

    def text(self) -> str:
        with self._lock:
            state = self.state()
            if state != self._state:
                self._text = render([read_run(folder) for folder in self._folders], live=True)
                self._state = state
            return self._text


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, followed: FollowedPage, *of_request: Any) -> None:
        self._followed = followed
        super().__init__(*of_request)  # which answers the request

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").partition(":")[0]
        if host not in (HOST, "localhost"):
            self.send_error(403)  # a foreign page whose name leads here must not read it
        elif self.path == "/":
            self._answer(self._followed.text(), "text/html")
        elif self.path == "/state":
            self._answer(self._followed.state(), "text/plain")
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
