"""A hub of this machine's own, with one private repository: it tells who asked for what, and with which token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40
REPOSITORY = "lender/private"
TOKEN = "hf_the_lenders_own"


@dataclass
class Hub:
    """``asked``: each request's path, and the token that came with it; empty: none."""

    address: str
    asked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def tokens(self) -> set[str]:
        return {token for _, token in self.asked}


@contextmanager
def hub(files: Mapping[str, bytes]) -> Iterator[Hub]:
    """Serves the files of REPOSITORY, as a model and as a data set, to whoever has TOKEN."""

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            self._answer()

        def _answer(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            path = self.path.partition("?")[0].replace("%2F", "/")
            found.asked.append((path, token))
            if token != TOKEN or REPOSITORY not in path:
                self._say(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif path.startswith("/api/"):
                self._say(200, json.dumps(self._described(path)).encode())
            elif (content := files.get(path.rpartition("/")[2])) is not None:
                begin, end = self._range(len(content))
                more = {"ETag": '"' + str(hash(content) & 0xFFFF) * 8 + '"', "X-Repo-Commit": COMMIT}
                partly = (
                    {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"} if end - begin < len(content) else {}
                )
                self._say(206 if partly else 200, content[begin:end], more | partly)
            else:
                self._say(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})

        def _described(self, path: str) -> object:
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": "b" * 40} for name, content in files.items()
            ]
            if "/tree/" in path or "/paths-info/" in path:
                return listed
            return {
                "id": REPOSITORY,
                "sha": COMMIT,
                "private": True,
                "siblings": [{"rfilename": name} for name in files],
            }

        def _range(self, size: int) -> tuple[int, int]:
            begin, _, end = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            return int(begin or 0), min(int(end) + 1 if end else size, size)

        def _say(self, status: int, content: bytes, more: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(more or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        found = Hub(f"http://127.0.0.1:{server.server_port}")
        serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        serving.start()
        try:
            yield found
        finally:
            server.shutdown()
            serving.join()
