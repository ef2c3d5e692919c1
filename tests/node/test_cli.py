"""A user's mistake is named with its value and the fix, and exits 2."""

from __future__ import annotations

import json
import socket
from pathlib import Path

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
        (["127.0.0.1:1", "--memory", "much"], "--memory 'much' is not an amount of memory; give it like 6GiB"),
        (["127.0.0.1:1", "--memory", "0"], "not an amount of memory"),
    ],
)
def test_bad_options(options: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    result = CliRunner().invoke(app, ["join", *options, "--id", "n"])
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_all_that_is_wrong_with_the_options_is_told_at_once() -> None:
    wrong = {
        "--device": "tpu",
        "--memory": "much",
        "--allow-data": "",
        "--listen": "nowhere",
        "--advertise": "here:port",
    }
    result = CliRunner().invoke(app, ["join", "dtfm1.x", *(part for option in wrong.items() for part in option)])
    assert result.exit_code == 2
    told = result.stderr.splitlines()
    for complaint in ("tpu", "much", "--allow-data", "nowhere", "here:port", "invitation is truncated"):
        assert sum(complaint in line for line in told) == 1


def test_a_relay_needs_an_invitation_as_a_node_does() -> None:
    result = CliRunner().invoke(app, ["relay", "dtfm1.spoilt", "--id", "r"])
    assert result.exit_code == 2
    assert "invitation" in result.stderr


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = CliRunner().invoke(app, ["join", "127.0.0.1:1", "--id", "n", "--listen", address])
    assert result.exit_code == 2
    assert address in result.stderr
    assert "--listen HOST:PORT" in result.stderr


def test_the_doctor_names_what_is_wrong_with_the_fix_and_exits_1() -> None:
    result = CliRunner().invoke(app, ["doctor", "127.0.0.1:1", "--device", "cpu", "--json"])
    assert result.exit_code == 1
    findings = {f["check"]: f for f in map(json.loads, result.stdout.splitlines())}
    assert findings["packages"]["good"]
    assert findings["coordinator"]["good"] is False
    assert "127.0.0.1:1: " in findings["coordinator"]["finding"]
    assert "dtfm-coordinator serve --listen 0.0.0.0:1" in findings["coordinator"]["fix"]
    people = CliRunner().invoke(app, ["doctor", "127.0.0.1:1", "--device", "cpu"])
    assert (
        "To fix:\n  1. coordinator: is this the right address, `dtfm-coordinator serve --listen 0.0.0.0:1`"
        in people.stdout
    )


def test_a_name_that_cannot_be_resolved_is_one_finding_of_the_doctors() -> None:
    result = CliRunner().invoke(app, ["doctor", "nosuch.invalid:7400", "--device", "cpu", "--json"])
    assert result.exit_code == 1
    findings = {f["check"]: f for f in map(json.loads, result.stdout.splitlines())}
    assert findings["coordinator"]["good"] is False
    assert "nosuch.invalid:7400: " in findings["coordinator"]["finding"]
    assert findings["listen"]["good"]


def test_the_doctor_passes_a_sound_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # which remembers no coordinator: it would be looked for
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert result.exit_code == 0
    assert "good listen: 0.0.0.0:0 is free" in result.stdout
    assert "To fix:" not in result.stdout


@pytest.mark.parametrize(
    "options",
    [["dtfm1.spoilt"], ["127.0.0.1"], ["--listen", "everywhere"], ["--advertise", "169.254.1.1:80"]],
)
def test_the_doctor_refuses_bad_input(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["doctor", *options, "--device", "cpu"])
    assert result.exit_code == 2
    assert result.stderr


def test_a_crash_shows_no_variables_as_they_may_be_secrets() -> None:
    assert not app.pretty_exceptions_enable


def test_a_bad_invitation_is_told_once_whatever_the_number_of_devices() -> None:
    result = CliRunner().invoke(app, ["join", "dtfm1.spoilt", "--device", "cpu,cpu"])
    assert result.exit_code == 2
    assert result.stderr.count("invitation is") == 1
