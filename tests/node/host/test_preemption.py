"""Preemption notices, from servers on loopback that answer like the cloud hosts' metadata services."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dtfm.node.host.preemption import HOSTS, Host, preemption_notice

AWS, GCP, AZURE = HOSTS
#: (method, path, headers) to status and body.
Answer = Callable[[str, str, dict[str, str]], tuple[int, bytes]]


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """The address of a server with these answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)


def aws(action: Callable[[], bytes]) -> Answer:
    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if (method, path) == ("PUT", "/latest/api/token"):
            return (200, b"proof") if headers.get("x-aws-ec2-metadata-token-ttl-seconds") else (400, b"")
        if path == "/latest/meta-data/spot/instance-action" and headers.get("x-aws-ec2-metadata-token") == "proof":
            body = action()
            return (200, body) if body else (404, b"")
        return 401, b""

    return answer


def at(host: Host, address: str) -> Host:
    return replace(host, address=address)


async def test_a_notice_that_comes_later_is_seen() -> None:
    actions = iter([b"", b"", json.dumps({"action": "terminate", "time": "2026-01-01T00:02:00Z"}).encode()])
    with serving(aws(lambda: next(actions))) as address:
        seen = await preemption_notice([at(AWS, address)], every=0.01)
    assert seen == "spot notice: the instance will terminate at 2026-01-01T00:02:00Z"


async def test_google_says_true() -> None:
    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        known = path == "/computeMetadata/v1/instance/preempted" and headers.get("metadata-flavor") == "Google"
        return (200, b"TRUE") if known else (403, b"")

    with serving(answer) as address:
        assert "being preempted" in await preemption_notice([at(GCP, address)])


@pytest.mark.parametrize(
    ("kind", "machine", "seen"),
    [("Preempt", "ours", True), ("Terminate", "ours", True), ("Freeze", "ours", False), ("Preempt", "another", False)],
)
async def test_azure_schedules_events(kind: str, machine: str, seen: bool) -> None:
    events = [{"EventType": kind, "NotBefore": "Mon, 19 Sep 2026 18:29:47 GMT", "Resources": [machine]}]

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if path.startswith("/metadata/instance/compute/name?"):
            return 200, b"ours"
        known = path.startswith("/metadata/scheduledevents?api-version=") and headers.get("metadata") == "true"
        return (200, json.dumps({"Events": events}).encode()) if known else (400, b"")

    with serving(answer) as address:
        waiting = asyncio.create_task(preemption_notice([at(AZURE, address)], every=0.01))
        done, _ = await asyncio.wait([waiting], timeout=10 if seen else 0.3)
        assert bool(done) is seen
        if seen:
            assert kind in waiting.result()
        waiting.cancel()


async def test_the_host_that_answers_is_the_one_that_is_watched() -> None:
    with serving(lambda *_: (404, b"")) as other, serving(aws(lambda: b'{"action": "stop", "time": "soon"}')) as ours:
        hosts = [at(AZURE, "http://127.0.0.1:1"), at(GCP, other), at(AWS, ours)]
        assert await preemption_notice(hosts) == "spot notice: the instance will stop at soon"


@pytest.mark.parametrize("body", [b"nonsense", b"[]", b"{}", b"\xff"])
async def test_a_meaningless_answer_is_not_a_notice(body: bytes) -> None:
    with serving(lambda *_: (200, body)) as address:
        assert await preemption_notice([at(host, address) for host in HOSTS]) == ""
