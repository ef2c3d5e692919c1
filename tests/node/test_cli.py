"""What a user gets wrong is named, with its value and the fix, and exits 2."""

from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

from dtfm.node.cli import app


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["127.0.0.1:1", "--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["127.0.0.1:1", "--device", "tpu"], "there is no device 'tpu'"),
        (["127.0.0.1:1", "--advertise", "here:port"], "the port must be a number"),
        (["127.0.0.1"], "give HOST:PORT"),
    ],
)
def test_bad_options(options: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["join", *options, "--id", "n"])
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = CliRunner().invoke(app, ["join", "127.0.0.1:1", "--id", "n", "--listen", address])
    assert result.exit_code == 2
    assert address in result.stderr
    assert "--listen HOST:PORT" in result.stderr
