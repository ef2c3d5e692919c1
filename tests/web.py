"""A web server on this machine: it serves parts of files, and tells which parts were asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Web:
    """``asked``: for each part, the file's name, its first byte, and the byte past its last one. The server refuses parts longer
    than ``longest``."""

    address: str
    longest: int = 1 << 40
    asked: list[tuple[str, int, int]] = field(default_factory=list)


@contextmanager
def web(folder: Path) -> Iterator[Web]:
    """Serves the files of ``folder``."""

    class Parts(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked, path = self.headers.get("Range"), Path(self.translate_path(self.path))
            if asked is None or not path.is_file():
                super().do_GET()
                return
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1, path.stat().st_size)
            found.asked.append((path.name, begin, end))
            if end - begin > found.longest:
                self.send_error(503)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{path.stat().st_size}")
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            self.wfile.write(path.read_bytes()[begin:end])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Parts, directory=str(folder))) as server:
        found = Web(f"http://127.0.0.1:{server.server_port}")
        serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        serving.start()
        try:
            yield found
        finally:
            server.shutdown()
            serving.join()
