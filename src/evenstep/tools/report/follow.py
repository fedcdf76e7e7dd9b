"""`evenstep report RUN_FOLDER... [--to FILE] [--follow]`: writes the page of runs, or serves it on this machine."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from evenstep.errors import ConfigError
from evenstep.process import EXIT_DONE
from evenstep.tools.report.page import render, write_page
from evenstep.tools.report.read import is_run, read_run

HOST = "127.0.0.1"
_WATCHED = ("*.json", "*.jsonl", "*.toml")


def run(paths: list[Path], *, to: Path | None, follow: bool) -> int:
    """Write the page and print its path; or serve it until Ctrl-C."""
    if follow and to is not None:
        raise ConfigError("`--to` can't be given with `--follow`, which writes no file; leave one out.")
    folders = list(dict.fromkeys(paths))
    missing = [f"`{folder}` must be a run folder, but is not there." for folder in folders if not folder.exists()]
    if missing:
        raise ConfigError(missing)
    if len(folders) > 1:  # `runs/*` may name other files
        folders = [folder for folder in folders if is_run(folder)]
        if not folders:
            raise ConfigError(f"none of the {len(paths)} paths is a run folder.")
    if not follow:
        beside = folders[0] if len(folders) == 1 else folders[0].parent
        print(write_page(folders, to or beside / "report.html"))
        return EXIT_DONE
    with server(folders) as serving, suppress(KeyboardInterrupt):
        print(f"{address_of(serving)}  (Ctrl-C ends it)", flush=True)
        serving.serve_forever(poll_interval=0.2)
    return EXIT_DONE


def server(folders: Sequence[Path]) -> ThreadingHTTPServer:
    """Server of the page, on a free port."""
    for folder in folders:
        read_run(folder)  # raises here and not in a request
    return ThreadingHTTPServer((HOST, 0), partial(_Handler, tuple(folders)))


def address_of(serving: ThreadingHTTPServer) -> str:
    return f"http://{HOST}:{serving.server_address[1]}/"


def _state(folders: Sequence[Path]) -> str:
    """Text that changes when a file of the runs does."""
    found: list[tuple[int, int]] = []
    for path in (path for folder in folders for pattern in _WATCHED for path in folder.glob(pattern)):
        with suppress(FileNotFoundError):  # replaced at this moment
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size))
    return f"{max(found, default=0)} {sum(size for _, size in found)}"


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
        with suppress(BrokenPipeError, ConnectionResetError):  # the browser has left
            self.wfile.write(content)
