"""Preemption notices: whose machine it is, what its metadata service says, and what nobody may make of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dtfm.node.host import preemption
from dtfm.node.host.preemption import CLOUDS, MOST_BYTES, NoAnswer, cloud_here, notices, preemption_notice
from tests.node.host.metadata import FIRMWARE, serving, write_firmware

NAMES = [cloud.name for cloud in CLOUDS]


@pytest.mark.parametrize("name", NAMES)
def test_the_firmware_says_whose_machine_it_is(name: str, tmp_path: Path) -> None:
    found = cloud_here(write_firmware(name, tmp_path / "id"))
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"sys_vendor": "Dell Inc.", "product_name": "PowerEdge"},
        {"sys_vendor": "Google", "product_name": "Eve"},  # a laptop
        {
            "sys_vendor": "Microsoft Corporation",
            "product_name": "Virtual Machine",
            "chassis_asset_tag": "1234",
        },  # Hyper-V
    ],
)
async def test_on_other_machines_nobody_is_asked(
    said: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in said.items():
        (tmp_path / name).write_text(text)
    assert cloud_here(tmp_path) is None

    async def asked(*_: object) -> None:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr(asyncio, "open_connection", asked)
    async with notices(lambda _: None, tmp_path):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("AWS", "AWS takes this machine back (a spot instance, to terminate at 2026-11-30T00:02:00Z)"),
        ("Google Cloud", "Google Cloud takes this machine back (a preemptible instance, in 30 seconds)"),
        ("Azure", "Azure takes this machine back (preempt at Mon, 30 Nov 2026 00:02:00 GMT)"),
    ],
)
async def test_a_notice_that_comes_later_is_seen(
    name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nobody's business
    (cloud,) = (each for each in CLOUDS if each.name == name)
    with serving(name, tmp_path) as service:
        waiting = asyncio.create_task(preemption_notice(cloud, service, every=0.01))
        seen = ""
        while seen.count("spot/instance-action") + seen.count("preempted") + seen.count("scheduledevents") < 3:
            done, _ = await asyncio.wait([waiting], timeout=0.05)
            assert not done
            seen += capsys.readouterr().out
        (tmp_path / "notice").touch()
        assert await waiting == says


@asynccontextmanager
async def saying(*pieces: bytes, hangs: bool = False) -> AsyncIterator[tuple[tuple[str, int], list[bytes]]]:
    """A service that answers everything with these bytes. Yields its address, and the requests that it gets."""
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if hangs:
                await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    service = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield service.sockets[0].getsockname()[:2], requests
    finally:
        service.close()


def http(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


HOSTILE = [
    b"",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    http(b"nonsense"),
    http(b"[]"),
    http(b"{}"),
    http(b"\xff"),
    http(b"[" * 60000),
    http(json.dumps({"action": "\x1b[2Jterminate", "time": 1}).encode()),
    http(b"", "302 Found\r\nLocation: http://127.0.0.1:1/"),
    b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\nTRUE",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffff\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n",
]


@pytest.mark.parametrize("cloud", CLOUDS, ids=NAMES)
@pytest.mark.parametrize("said", HOSTILE, ids=range(len(HOSTILE)))
async def test_a_meaningless_answer_is_no_notice(cloud: preemption.Cloud, said: bytes) -> None:
    async with saying(said) as (service, _):
        with pytest.raises((NoAnswer, ValueError, OSError)):
            await cloud.asks(lambda *asked: preemption._fetch(service, *asked))


async def test_an_answer_is_bounded_in_size_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with saying(b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * MOST_BYTES] * 100) as (service, _):
        with pytest.raises(NoAnswer, match="more than"):
            await preemption._fetch(service, "GET", "/", {})
    monkeypatch.setattr(preemption, "ANSWER_SECONDS", 0.05)
    async with saying(b"HTTP/1.1 200 OK\r\n\r\n", hangs=True) as (service, _):
        with pytest.raises(TimeoutError):
            await preemption._fetch(service, "GET", "/", {})


async def test_a_service_that_fails_is_said_once_and_asked_ever_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 8:
            raise asyncio.CancelledError

    caplog.set_level("INFO")
    monkeypatch.setattr(asyncio, "sleep", sleep)
    async with saying(http(b"", "503 Busy")) as (service, _):
        with pytest.raises(asyncio.CancelledError):
            await preemption_notice(CLOUDS[0], service)
    assert pauses == [10, 20, 40, 60, 60, 60, 60, 60]
    assert caplog.text.count("AWS's metadata service does not answer (no token (status 503))") == 1


async def test_the_first_notice_is_told_and_the_watch_ends_with_its_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with serving("Google Cloud", tmp_path) as service:
        monkeypatch.setattr(preemption.preemption_notice, "__defaults__", (service, 0.01))
        async with notices(told.set_result, write_firmware("Google Cloud", tmp_path / "id")):
            (tmp_path / "notice").touch()
            assert (await told).startswith("Google Cloud takes this machine back")
        async with notices(told.set_result, tmp_path / "id"):
            pass
    await asyncio.sleep(0)  # the second watch is called off
    assert len(asyncio.all_tasks()) == 1
    assert set(FIRMWARE) == set(NAMES)


@pytest.mark.parametrize("status", [302, 401, 500])
async def test_only_a_404_says_that_aws_gives_no_notice(status: int) -> None:
    async def fetch(method: str, *_: object) -> tuple[int, bytes]:
        return (200, b"proof==") if method == "PUT" else (status, b"")

    with pytest.raises(NoAnswer, match=str(status)):
        await CLOUDS[0].asks(fetch)
