"""A coordinator and nodes as containers and services: the same command each time, the rest from the environment."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import typer

import dtfm.coordinator.cli
import dtfm.node.cli
from dtfm.protos.identity.invitation import read_invitation
from tests.cluster.launch import Cluster
from tests.cluster.ports import free_port
from tests.cluster.runs import GPT2, run_file
from tests.cluster.test_invitations import join


def test_the_same_command_starts_a_run_and_goes_on_with_it(tmp_path: Path) -> None:
    given = tmp_path / "given" / "node"
    options = ("--invitation-file", str(given))
    text = run_file(model=GPT2, stages=[1], steps=5000, learning_rate=1e-3)
    with Cluster(tmp_path, text, address=f"127.0.0.1:{free_port()}", start=False) as cluster:
        cluster.start_coordinator(*options)
        assert cluster.invitation == "", "what is printed stays in logs"
        assert given.stat().st_mode & 0o777 == 0o600
        first = given.read_text()
        join(cluster, "a", str(given))
        cluster.wait_for("step_committed")
        kill(cluster)

        begun = len(cluster.events)
        cluster.start_coordinator(*options)
        assert given.read_text() == first, "it is good still"
        cluster.wait_for("step_committed", after=begun)

        kill(cluster)
        given.write_text("dtfm1.spoilt")
        given.chmod(0o600)
        cluster.start_coordinator(*options)
        assert given.read_text() not in (first, "dtfm1.spoilt")
        begun = len(cluster.events)
        join(cluster, "b", str(given))
        cluster.wait_for("node_joined", where=lambda e: e["node"] == "b", after=begun)
        kill(cluster)
        replaced = read_invitation(given.read_text()).id
        given.chmod(0o644)  # others may have read it
        begun = len(cluster.events)
        cluster.start_coordinator(*options)
        revoked = cluster.wait_for("revoked", after=begun)
        assert revoked["invitations"] == [replaced]
        assert read_invitation(given.read_text()).id != replaced
        assert given.stat().st_mode & 0o777 == 0o600
    steps = [e["step"] for e in cluster.of("step_committed")]
    assert steps == list(range(1, len(steps) + 1))


def kill(cluster: Cluster) -> None:
    assert cluster.coordinator is not None
    cluster.coordinator.send(signal.SIGKILL)
    cluster.coordinator.wait(20)


@pytest.mark.parametrize(
    ("app", "command", "environment", "expected"),
    [
        (
            dtfm.node.cli.app,
            "join",
            {"DTFM_INVITATION": "i", "DTFM_LISTEN": "h:1", "DTFM_ADVERTISE": "h:2 [::1]:3", "DTFM_OPEN_PORT": "no"},
            {"invitation": "i", "listen": "h:1", "advertise": ["h:2", "[::1]:3"], "open_port": False},
        ),
        (dtfm.node.cli.app, "relay", {"DTFM_GIVE_UP_AFTER": "7"}, {"give_up_after": 7.0}),
        (
            dtfm.coordinator.cli.app,
            "serve",
            {"DTFM_LISTEN": "0.0.0.0:7400", "DTFM_STORE": "x.db"},
            {"listen": "0.0.0.0:7400", "store": "sqlite:///x.db"},
        ),
        (dtfm.coordinator.cli.app, "events", {"DTFM_STORE": "sqlite:///x.db"}, {"store": ""}),
    ],
    ids=["join", "relay", "serve", "the other commands ask the coordinator"],
)
def test_every_option_of_a_service_can_come_from_the_environment(
    app: typer.Typer,
    command: str,
    environment: dict[str, str],
    expected: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    with group.make_context("dtfm", [command, "--help"], resilient_parsing=True) as above:
        found = group.commands[command]
        with found.make_context(command, [], parent=above, **found.context_settings) as context:
            assert context.params | expected == context.params
