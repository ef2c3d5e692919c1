"""Who may read the page, and what its port answers."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import suppress
from pathlib import Path

import pytest
from starlette.types import Message

from dtfm.coordinator.command import health
from dtfm.coordinator.service.port.strangers import Limits
from dtfm.coordinator.web import app, callers, serving
from dtfm.coordinator.web.serving import bind, bind_page, link_to
from tests.coordinator.web.serving_page import asked, connected, page_of
from tests.coordinator.web.stored_run import slow_run, stored_run


async def test_the_run_is_answered_as_of_now_and_as_of_an_event(tmp_path: Path) -> None:
    records = stored_run()
    async with page_of(records, tmp_path) as served:
        for path, step in (("/state?at=60", 36), ("/state?at=99999", 180), ("/state", 180)):
            status, headers, content = await asked(served.link, path)
            assert (status, headers["content-type"]) == (200, "application/json")
            assert json.loads(gzip.decompress(content))["head"]["step"] == step
        for wrong in ("-1", "x", "1.5", "9" * 16):
            assert (await asked(served.link, f"/state?at={wrong}"))[0] == 400
        assert (await asked(served.link, "/../app.py"))[0] == 404


async def test_the_metrics_are_on_the_pages_port_and_alone_on_another(tmp_path: Path) -> None:
    async with page_of(stored_run(), tmp_path) as served:
        status, headers, content = await asked(served.link, "/metrics")
        assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert b"\ndtfm_step 180.0\n" in content
        assert (await asked(served.link, "/metrics", "evil.example"))[0] == 400
        assert b"\ndtfm_step 180.0\n" in (await asked(served.metrics, "/metrics", "coordinator"))[2]
        for path in ("/", "/state", "/news"):
            assert (await asked(served.metrics, path))[0] == 404, "the other port has metrics alone"


async def test_a_stranger_at_the_port_of_the_metrics_takes_few_connections_and_none_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, seconds in ((1, 0.1), (0, 600.0)):
        monkeypatch.setattr(serving, "limits_within", lambda _files, most=most, **_: Limits(open_of_one=most))
        monkeypatch.setattr(callers, "STRANGER_SECONDS", seconds)
        (tmp_path / str(most)).mkdir()
        async with page_of(stored_run()[:1], tmp_path / str(most)) as served, asyncio.timeout(30):
            with suppress(ConnectionError):
                reader, writer = await connected(served.metrics)
                said = await reader.read()
                writer.close()
                assert said == b"", "it says nothing, and is closed"


async def test_the_name_of_a_strangers_site_is_refused_and_nothing_foreign_may_run_in_the_page(tmp_path: Path) -> None:
    async with page_of(stored_run(), tmp_path) as served:
        for host in ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example"):
            assert (await asked(served.link, "/state", host))[0] == 400, host
        for host in ("[::1.evil.example]", "::1.evil.example", "127.0.0.1@evil.example", "128.0.0.1", ""):
            assert (await asked(served.link, "/state", host or " "))[0] == 400, host
        for host in ("localhost:1234", "127.0.0.1", "127.8.9.1:80", "[::1]", "[::1]:7480", "LOCALHOST"):
            assert (await asked(served.link, "/", host))[0] == 200, host
        for path in ("/", "/page.js", "/state", "/nothing"):
            headers = (await asked(served.link, path))[1]
            assert headers["content-security-policy"].startswith("default-src 'self';")
            assert headers["x-content-type-options"] == "nosniff"


def test_an_address_that_cannot_be_had_is_refused_with_what_to_do() -> None:
    with bind_page("127.0.0.1:0") as taken:
        port = taken.getsockname()[1]
        assert link_to(taken) == f"http://127.0.0.1:{port}/"
        with pytest.raises(ValueError, match="--no-page"):
            bind_page(f"127.0.0.1:{port}")
        with pytest.raises(ValueError, match=rf"--metrics 127\.0\.0\.1:{port}: cannot listen there"):
            bind(f"127.0.0.1:{port}", "--metrics")


async def test_the_default_port_gives_way_where_another_page_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with bind_page("127.0.0.1:0") as taken:
        monkeypatch.setattr("dtfm.coordinator.web.serving.DEFAULT_PAGE", f"127.0.0.1:{taken.getsockname()[1]}")
        with bind_page("") as other:
            assert link_to(other) != link_to(taken)


class Follower:
    """Has news all the time."""

    def __init__(self) -> None:
        self.last, self.ended = 0, asyncio.Event()

    async def news(self, _seconds: float) -> int:
        self.last += 1
        return self.last


async def test_a_viewer_that_takes_nothing_is_dropped_and_those_beyond_the_bound_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(app, "SLOW_SECONDS", 0.2)
    monkeypatch.setattr(app, "MOST_VIEWERS", 1)
    viewers, never, answers = app.Viewers(Follower()), asyncio.Event(), asyncio.Queue[Message]()  # type: ignore[arg-type]

    async def receive() -> Message:
        await never.wait()
        return {"type": "http.disconnect"}

    async def takes_nothing(message: Message) -> None:
        if message["type"] == "http.response.body":
            await never.wait()

    async def takes(message: Message) -> None:
        answers.put_nowait(message)

    scope = {"type": "http", "method": "GET", "path": "/news", "headers": []}
    slow = asyncio.create_task(viewers(scope, receive, takes_nothing))
    await asyncio.sleep(0)
    await viewers(scope, receive, takes)
    assert answers.get_nowait()["status"] == 503
    await asyncio.wait_for(slow, 10)
    answers = asyncio.Queue()
    reading = asyncio.create_task(viewers(scope, receive, takes))
    told = [(await asyncio.wait_for(answers.get(), 10)).get("body") for _ in range(4)]
    assert told[1:] == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]
    never.set()
    await asyncio.wait_for(reading, 10)


async def test_a_supervisor_asks_whether_the_run_gets_on(tmp_path: Path) -> None:
    async with page_of(slow_run(), tmp_path) as served:
        for link in (served.link, served.metrics):
            status, headers, content = await asked(link, "/healthz")
            assert (status, headers["content-type"]) == (200, "application/json")
            reason = "slow: runpod-2 takes 2.9 times the planned time"
            assert json.loads(content) == {"healthy": True, "state": "training", "step": 192, "reason": reason}
        assert (await asked(served.link, "/healthz", "evil.example"))[0] == 400
        at = served.link.rstrip("/")
        found = await asyncio.to_thread(health._by_page, at)
        assert found == await asyncio.to_thread(health._by_page, f"{at}/healthz") == json.loads(content)
        with pytest.raises(ValueError, match="answers 404; name the page of a coordinator"):
            await asyncio.to_thread(health._by_page, f"{at}/page.js")
    with pytest.raises(ValueError, match="no coordinator answers at http"):
        await asyncio.to_thread(health._by_page, at)


async def test_a_run_that_stands_still_or_cannot_be_logged_is_not_healthy(tmp_path: Path) -> None:
    records = stored_run()
    for name, later, problem in (("still", 400.0, ""), ("log", 1.0, "the log cannot be written")):
        (tmp_path / name).mkdir()
        async with page_of(records, tmp_path / name, later=later, problem=problem) as served:
            status, _, content = await asked(served.link, "/healthz")
            assert status == 503
            reason = problem or "stands still: step 181 does not end; steps took 9.98 s"
            assert json.loads(content) == {"healthy": False, "state": "training", "step": 180, "reason": reason}
            assert not (await asyncio.to_thread(health._by_page, served.link))["healthy"]
