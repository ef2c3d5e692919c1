"""`python -m tests.node.host.metadata CLOUD FOLDER [HOST PORT]`: answers as the metadata service of that cloud does.

It prints each request that it gets, after "listening". There is a notice once FOLDER has a file "notice".
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FIRMWARE = {
    "AWS": {"sys_vendor": "Amazon EC2\n"},
    "Google Cloud": {"product_name": "Google Compute Engine\n"},
    "Azure": {"sys_vendor": "Microsoft Corporation\n", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n"},
}


def write_firmware(cloud: str, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, text in FIRMWARE[cloud].items():
        (folder / name).write_text(text)
    return folder


def answer(cloud: str, noticed: bool, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    """``headers`` with names in lower case."""
    if cloud == "AWS":
        if (method, path) == ("PUT", "/latest/api/token"):
            return (200, b"proof==") if headers.get("x-aws-ec2-metadata-token-ttl-seconds") else (400, b"")
        if headers.get("x-aws-ec2-metadata-token") != "proof==":
            return 401, b""
        if path == "/latest/meta-data/spot/instance-action" and noticed:
            return 200, b'{"action": "terminate", "time": "2026-11-30T00:02:00Z"}'
    elif cloud == "Google Cloud" and headers.get("metadata-flavor") == "Google":
        if path == "/computeMetadata/v1/instance/preempted":
            return 200, b"TRUE" if noticed else b"FALSE"
    elif cloud == "Azure" and headers.get("metadata") == "true":
        if path.startswith("/metadata/instance/compute/name?"):
            return 200, b"ours"
        if path.startswith("/metadata/scheduledevents?api-version="):
            mine = {"EventType": "Preempt", "Resources": ["ours"], "NotBefore": "Mon, 30 Nov 2026 00:02:00 GMT"}
            others = [{**mine, "Resources": ["another"]}, {**mine, "EventType": "Freeze"}]
            return 200, json.dumps({"Events": [*others, mine] if noticed else others}).encode()
    return 404, b""


def server(cloud: str, folder: Path, address: tuple[str, int]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            noticed = (folder / "notice").exists()
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, body = answer(cloud, noticed, self.command, self.path, headers)
            print(self.command, self.path, self.client_address[0], flush=True)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    return ThreadingHTTPServer(address, Handler)


@contextmanager
def serving(name: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Runs such a service in a thread. Yields its address."""
    with server(name, folder, ("127.0.0.1", 0)) as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield "127.0.0.1", service.server_address[1]
        finally:
            service.shutdown()
            thread.join(10)


def main() -> None:
    cloud, folder, host, port = sys.argv[1:]
    with server(cloud, Path(folder), (host, int(port))) as serving:
        print("listening", flush=True)
        serving.serve_forever()


if __name__ == "__main__":
    main()
