"""Messages to the operator's URL: their contents, and the effect of a slow, broken or secret URL on the run."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.service import notifying as service
from dtfm.coordinator.service.notifying import MOST_WAITING, notifying
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.view.so_far import STALL_LEASES
from dtfm.protos.run_file.errors import RunFileError
from dtfm.protos.run_file.run_file import parse_run
from tests.coordinator.script import run_table
from tests.coordinator.serving import run_in, serving, train

SECRET = "s3cret-token"
STARTED = ev.RunStarted("id", {"name": "x", "cluster": {"lease": 2.0}})


@contextmanager
def hook(status: int = 204, hold: threading.Event | None = None) -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """A URL, and the messages posted to it. It answers when ``hold`` is set."""
    posted = queue.Queue[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if hold is not None:
                hold.wait(60)
            self.send_response(status)
            self.send_header("Location", self.path)
            self.end_headers()

        def do_GET(self) -> None:
            posted.put({"event": "redirected"})

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/{SECRET}", posted
        finally:
            server.shutdown()


class Run:
    """Calls listeners with events that are as late as ``now`` says."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._listeners: list[Callable[[Record], None]] = []

    def on_event(self, listener: Callable[[Record], None]) -> None:
        self._listeners.append(listener)

    def tell(self, event: ev.Event, ago: float = 0.0) -> None:
        self.ledger = event.apply(self.ledger)
        for listener in self._listeners:
            listener(Record(1, time.time() - ago, event))


async def next_of(posted: queue.Queue[dict[str, Any]]) -> dict[str, Any]:
    return await asyncio.to_thread(posted.get, timeout=30)


async def test_a_person_is_told_of_what_needs_one_and_of_no_address() -> None:
    run = Run()
    with hook() as (url, posted):
        async with notifying(url, lambda: run.ledger, run.on_event):
            run.tell(STARTED)
            assert await next_of(posted) == {"run": "x", "event": "run_started", "sentence": "run x started (id id)"}
            run.tell(ev.NodeJoined("a", "", "203.0.113.7:7000", ev.DeviceSeen("cpu", "a cpu", 1, 1.0)))
            run.tell(ev.NodeQuarantined("a", Charge.AUDIT, "203.0.113.7 said\n" + 999 * "x", 3))
            told = await next_of(posted)
            assert told["event"] == "node_quarantined"
            assert "(address hidden) said" in told["sentence"]
            assert told["sentence"].isprintable()
            assert len(told["sentence"]) == 400
            run.tell(ev.RunFinished(3, "all steps are done"))
        assert posted.get(timeout=30)["event"] == "run_finished", "it is sent before the process may end"
        assert posted.empty()


async def test_a_run_that_needs_an_operator_says_so_and_one_that_waits_for_nodes_does_not() -> None:
    run = Run()
    with hook() as (url, posted):
        async with notifying(url, lambda: run.ledger, run.on_event):
            run.tell(ev.Waiting("1 of 2 nodes is ready"))
            run.tell(ev.Waiting("say `dtfm-coordinator continue --from weights`", asks=True))
            told = await next_of(posted)
            assert told["sentence"] == "waiting: say `dtfm-coordinator continue --from weights`"
        assert posted.empty()


async def test_a_run_that_stands_still_is_told_once_and_so_is_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.01)
    run = Run()
    with hook() as (url, posted):
        async with notifying(url, lambda: run.ledger, run.on_event):
            run.tell(STARTED)
            assert (await next_of(posted))["event"] == "run_started"
            run.tell(ev.StepCommitted(1, 1, 2.0, 5, 1.0, 0.1, 5, {}, {}), ago=2 * STALL_LEASES - 1)
            run.tell(ev.Waiting("1 of 2 nodes is ready"))
            told = await next_of(posted)
            assert told["event"] == "run_stalled"
            assert told["sentence"] == "no step was committed for 60 s, after step 1: 1 of 2 nodes is ready"
            run.tell(ev.StepCommitted(2, 1, 2.0, 5, 1.0, 0.1, 5, {}, {}))
            assert (await next_of(posted))["event"] == "run_goes_on"
            run.tell(ev.StepCommitted(3, 1, 2.0, 5, 1.0, 0.1, 5, {}, {}), ago=1e3)
            assert (await next_of(posted))["event"] == "run_stalled"
            run.tell(ev.RunPaused("bob"))
            run.tell(ev.RunContinued("bob"))
            run.tell(ev.RunFailed(3, "why"))
            assert (await next_of(posted))["event"] == "run_failed"
        assert posted.empty()


async def test_a_url_that_hangs_delays_nobody_and_what_it_cannot_take_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "SEND_SECONDS", 2.0)
    run, hold = Run(), threading.Event()
    with hook(hold=hold) as (url, posted):
        began = time.monotonic()
        async with notifying(url, lambda: run.ledger, run.on_event):
            for _ in range(3 * MOST_WAITING):
                run.tell(STARTED)
            assert time.monotonic() - began < 1.5
        assert time.monotonic() - began < 10, "the end does not wait for all of them"
        hold.set()
        assert posted.qsize() <= 3
    assert caplog.text.count("too many messages wait") == 1  # not once per lost message, as below
    assert SECRET not in caplog.text


@pytest.mark.parametrize("status", [404, 302, 307])
async def test_a_failure_is_said_once_and_without_the_url(status: int, caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    with caplog.at_level(logging.DEBUG), hook(status) as (url, posted):
        async with notifying(url, lambda: run.ledger, run.on_event):
            for _ in range(3):
                run.tell(STARTED)
                assert (await next_of(posted))["event"] == "run_started", "a redirection is not followed"
        async with notifying(f"https{url.removeprefix('http')}", lambda: run.ledger, run.on_event):
            run.tell(STARTED)
    # Not for every lost message: another test may have left messages that are still being sent.
    assert caplog.text.count(f"it answered {status}") == 1
    assert caplog.text.count("SSLError") == 1
    assert SECRET not in caplog.text
    assert "127.0.0.1" not in caplog.text


async def test_the_url_is_in_no_log_no_checkpoint_and_no_message_to_nodes(tmp_path: Path) -> None:
    run = run_in(tmp_path, notify={"url": f"https://example.org/{SECRET}"})
    assert run.notify.url.endswith(SECRET)
    assert SECRET not in repr(run)
    assert SECRET.encode() not in run.message("id").SerializeToString()
    async with serving(tmp_path, run) as served:
        await train(served, served.node("a"), served.node("b"))
        assert SECRET not in "".join(ev.to_text(event) for event in served.events)
    written = {path.name: path.read_bytes() for path in files_in(tmp_path)}
    assert "manifest.json" in written
    assert [name for name, content in written.items() if SECRET.encode() in content] == []


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "url",
    [f"ftp://example.org/{SECRET}", f"https://bob:{SECRET}@example.org/", f"https://example.org/ {SECRET}", [SECRET]],
    ids=["kind", "user", "space", "type"],
)
def test_a_url_that_cannot_be_is_refused_without_being_shown(url: object) -> None:
    with pytest.raises(RunFileError, match=r"notify\.url = \(hidden\): must be") as refused:
        parse_run(run_table(notify={"url": url}), "RUN.toml")
    assert SECRET not in str(refused.value)
