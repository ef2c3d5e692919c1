"""Thousands of connections to the page, which has a thread and files in common with the run: the run goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import pytest

from dtfm.protos.open_files import raise_limit
from tests.cluster.launch import ROOT, Cluster
from tests.cluster.ports import free_port
from tests.cluster.runs import GPT2, run_file

MANY = 2000
SLOWEST = 3.0
"""Seconds for a step on a machine that others use."""
FEW_FILES = 1024
"""The usual bound of a process."""
WITH_FEW_FILES = ["prlimit", f"--nofile={FEW_FILES}:{FEW_FILES}"]
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""Of HTTP/2, with empty settings (RFC 9113, section 3.4)."""


@contextmanager
def flooded(port: int) -> Iterator[None]:
    """Connections to the port, each with half a request; only connections that are not cut off stay."""
    assert raise_limit() > MANY + 200, "this test needs as many open files"
    held = list[socket.socket]()
    try:
        for _ in range(MANY):
            with suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), 0.5))
                held[-1].sendall(b"GET / HTTP/1.1\r\nHost: ")
        yield
    finally:
        for each in held:
            each.close()


def is_answered(port: int) -> bool:
    """Whether the coordinator's gRPC answers whoever connects."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 30) as plain,
            context.wrap_socket(plain) as connection,
        ):
            connection.sendall(GREETING)
            return len(connection.recv(9)) > 0
    except OSError:
        return False


def test_a_coordinator_with_few_files_answers_while_its_page_is_flooded(tmp_path: Path) -> None:
    page = free_port()
    (tmp_path / "run.toml").write_text("name = 'test'\n")
    command = [*WITH_FEW_FILES, sys.executable, "-m", "dtfm.coordinator.cli", "serve", "run.toml", "--json"]
    command += ["--listen", "127.0.0.1:0", "--web", f"127.0.0.1:{page}"]
    folders = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, **folders, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            events = (json.loads(line) for line in process.stdout)
            address = next(event["address"] for event in events if event["event"] == "listening")
            with flooded(page):
                assert is_answered(int(address.rpartition(":")[2]))
                assert len(os.listdir(f"/proc/{process.pid}/fd")) < FEW_FILES / 2
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # what it compiles, too


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_2000_connections_to_the_page_cost_at_most_a_tenth_of_the_steps(tmp_path: Path) -> None:
    port = free_port()
    text = run_file(model=GPT2, stages=[1], steps=100_000, learning_rate=1e-3)
    place = {"coordinator": WITH_FEW_FILES}
    with Cluster(tmp_path, text, place=lambda name, command: [*place.get(name, []), *command], start=False) as cluster:
        cluster.start_coordinator("--web", f"127.0.0.1:{port}")
        cluster.add("a")
        cluster.wait_for("step_committed", where=lambda event: event["step"] >= 20)
        ratios = []
        for _ in range(5):
            quiet = steps_a_second(cluster)
            with flooded(port):
                ratios.append(steps_a_second(cluster) / quiet)
    assert median(ratios) >= 0.9, ratios


def steps_a_second(cluster: Cluster, steps: int = 100) -> float:
    """Of the next ``steps``, by the coordinator's clock."""
    first = cluster.wait_for("step_committed", after=len(cluster.events))
    last = cluster.wait_for(
        "step_committed",
        after=len(cluster.events),
        where=lambda event: event["step"] >= first["step"] + steps,
        timeout=SLOWEST * steps,
    )
    return float((last["step"] - first["step"]) / (last["time"] - first["time"]))
