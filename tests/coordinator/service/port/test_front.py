"""The coordinator's port when something fails: `service/port/front.py`."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import pytest

from dtfm.coordinator.cli import main
from dtfm.coordinator.service.port import caller as callers, front
from dtfm.coordinator.service.port.accepting import REFUSED_PAUSE_SECONDS, Accepting
from dtfm.coordinator.service.port.front import Front
from dtfm.coordinator.service.port.strangers import Strangers
from dtfm.coordinator.service.server import Deaf
from tests.coordinator.serving import serving

PATIENCE = 20


async def test_a_connection_that_ends_while_it_is_taken_leaves_its_place_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ended(_: socket.socket) -> None:
        loop.call_soon_threadsafe(taken.set)
        raise OSError("Invalid argument")

    async with serving(tmp_path) as served:
        monkeypatch.setattr(front, "_notice_death", ended)
        host, port = served.address.split(":")
        # asyncio's own connect fails if the reset comes before it looks.
        stranger = await asyncio.to_thread(socket.create_connection, (host, int(port)))
        await asyncio.wait_for(taken.wait(), PATIENCE)
        monkeypatch.undo()
        await served.enrolled("n0")  # the port answers
        at = served.server._front
        with at._lock:
            assert at._strangers.open == sum(not caller.key for caller in at._open)
        stranger.close()


async def test_after_a_restart_it_is_known_where_members_are(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.node("a"):
        await served.until(lambda: "a" in served.ledger.members)
    async with serving(tmp_path) as served:
        assert list(served.server._front._strangers._members) == ["10.0.0.1"]


async def test_a_connection_that_makes_room_before_it_is_whole_is_cut_off(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        at = served.server._front
        caller = callers.Caller(at, ip_address("192.0.2.1"))
        caller.cut_off()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        asyncio.run_coroutine_threadsafe(at._take(caller, ours), at._loop)
        theirs.settimeout(callers.HELLO_SECONDS / 2)
        assert await asyncio.to_thread(theirs.recv, 1) == b""


async def test_strangers_who_come_one_after_the_other_are_refused_together_and_who_comes_next_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken, accept = [0], Accepting.accept

    def counted(accepting: Accepting) -> None:
        woken[0] += 1
        accept(accepting)

    def come(address: str) -> float:
        host, port = address.split(":")
        began = time.monotonic()
        callers = [socket.socket() for _ in range(200)]
        for caller in callers:
            with suppress(
                ConnectionResetError
            ):  # a refused caller may hear of it before it knows that it was connected
                caller.connect((host, int(port)))
            time.sleep(0.001)  # so that each comes by itself
        for caller in callers:
            with suppress(OSError):
                assert caller.recv(1) == b"", "a refused caller is told nothing"
            caller.close()
        return time.monotonic() - began

    monkeypatch.setattr(Accepting, "accept", counted)
    async with serving(tmp_path) as served:
        with monkeypatch.context() as refusing:
            refusing.setattr(Strangers, "come", lambda *_: None)
            before = woken[0]
            seconds = await asyncio.to_thread(come, served.address)
            assert woken[0] - before <= seconds / REFUSED_PAUSE_SECONDS + 2
        await served.enrolled("n0")


async def test_a_coordinator_to_which_nobody_can_connect_ends_with_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        assert not served.server._front.has_died
        at = served.server._front
        at._loop.call_soon_threadsafe(at._loop.stop)
        with pytest.raises(Deaf, match="nobody can connect any more"):
            await asyncio.wait_for(asyncio.shield(served.task), PATIENCE)


def test_serve_says_so_in_a_sentence_and_ends_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = Front.start

    def dies(self: Front) -> None:
        began(self)
        self._loop.call_soon_threadsafe(self._loop.stop)

    monkeypatch.setattr(Front, "start", dies)
    (tmp_path / "run.toml").write_text(f"[cluster]\nlease = 1.0\n[checkpoint]\nuri = '{(tmp_path / 'c').as_uri()}'\n")
    monkeypatch.setattr("sys.argv", ["dtfm-coordinator", "serve", str(tmp_path / "run.toml")])
    monkeypatch.setenv("DTFM_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("DTFM_STORE", f"sqlite:///{tmp_path / 'dtfm.db'}")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert (
        "so that nobody can connect any more; a new process goes on with the run (the same command)"
        in capsys.readouterr().err
    )


async def test_two_may_close_it_at_a_time(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        at = served.server._front
        await asyncio.wait_for(asyncio.gather(*(served.server.close() for _ in range(3))), PATIENCE)
        assert not at._thread.is_alive()


async def test_a_long_folder_for_temporary_files_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with serving(tmp_path) as served:
        await served.enrolled("n0")


async def test_a_server_that_cannot_listen_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise RuntimeError("Failed to bind")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(front, "_MOST_PARENT_BYTES", 1000)
    monkeypatch.setattr(front.Front, "bind", fails)
    with pytest.raises(RuntimeError, match="Failed to bind"):
        async with serving(tmp_path):
            pass
    assert not any(name.startswith("dtfm-front-") for name in os.listdir(tmp_path))
