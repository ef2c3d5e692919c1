"""Invitations between real processes: some nodes come by one, some are refused, and some are cut off."""

from __future__ import annotations

import base64
import json
import signal
import sys
import time
from contextlib import closing
from email.message import Message
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio
import pytest

from dtfm.protos.connection import open_channel, server_options
from dtfm.protos.identity.credentials import coordinator_credentials, to_peer
from dtfm.protos.identity.invitation import Invitation, read_invitation
from dtfm.protos.streams import method
from tests.cluster.launch import Cluster, Process
from tests.cluster.ports import free_port
from tests.cluster.runs import GPT2, losses_alone, run_file
from tests.cluster.short_certificates import LIFETIME
from tests.cluster.test_strangers import elsewhere, joined

LONG = run_file(model=GPT2, stages=[2], steps=5000, learning_rate=1e-3)


def command(cluster: Cluster, *arguments: str, state: str = "state") -> tuple[int, dict[str, Any], str]:
    """Runs dtfm-coordinator as a user with this state folder; returns its exit code, what it prints, and its complaint."""
    lines: list[bytes] = []
    process = Process(
        [sys.executable, "-m", "dtfm.coordinator.cli", *arguments, "--json"],
        cluster.folder,
        environment={"XDG_STATE_HOME": str(cluster.folder / state)},
        on_line=lines.append,
    )
    try:
        code = process.wait(60)
    finally:
        process.close()
    return code, json.loads(lines[-1]) if lines else {}, process.errors


def invite(cluster: Cluster, *options: str) -> str:
    code, printed, errors = command(cluster, "invite", cluster.address, *options)
    assert code == 0, errors
    return str(printed["invitation"])


def machine(cluster: Cluster, name: str, invitation: str = "") -> dict[str, str]:
    """The environment of a node on a machine of its own, with the invitation in it."""
    allowed = {"DTFM_ALLOW_DATA": str(cluster.folder)}
    return {**elsewhere(cluster.folder / f"machine-{name}"), "DTFM_INVITATION": invitation, **allowed}


def join(cluster: Cluster, name: str, invitation: str, *, on: str = "") -> Process:
    """Starts a node as one does on a rented machine: its invitation is in the environment."""
    line = [sys.executable, "-m", "dtfm.node.cli", "join", "--id", name, "--threads", "1", "--device", "cpu"]
    process = Process(line, cluster.folder, environment=machine(cluster, on or name, invitation))
    cluster.nodes[f"{name}-{len(cluster.nodes)}"] = process
    cluster._started.append((name, process))
    return process


def test_a_stolen_invitation_is_useless_after_its_last_use_and_after_it_has_expired(tmp_path: Path) -> None:
    with Cluster(tmp_path, LONG) as cluster:
        once = invite(cluster, "--uses", "1")
        join(cluster, "owner", once)
        cluster.wait_for("node_joined")
        thief = join(cluster, "thief", once)
        assert thief.wait(60) == 2
        assert "INVITATION_USED_UP" in thief.errors
        short = invite(cluster, "--expires", "1s", "--uses", "9")
        time.sleep(1.1)  # there is no event to wait for
        late = join(cluster, "late", short)
        assert late.wait(60) == 2
        assert "INVITATION_EXPIRED" in late.errors
        secret = read_invitation(once).secret
        forms = [secret, secret.hex().encode(), base64.b64encode(secret)[:40], base64.urlsafe_b64encode(secret)[:40]]
        forms.append(once[70:100].encode())  # as it stands in the invitation
        stored = b"".join(path.read_bytes() for path in tmp_path.glob("store.db*"))
        assert read_invitation(once).id.encode() in stored  # what is there is found
        assert not any(form in stored for form in forms)
        assert not any(form in process.errors.encode() for form in forms for _, process in cluster._started)


async def test_a_revoked_member_is_cut_off_within_a_second_at_its_peers_too(tmp_path: Path) -> None:
    with Cluster(tmp_path, LONG) as cluster:
        for name in ("a", "b"):
            join(cluster, name, invite(cluster))
        revoked = join(cluster, "c", invite(cluster))
        cluster.wait_for("step_committed")
        (a,) = (event["address"] for event in cluster.of("node_joined") if event["node"] == "a")
        mine = await joined(tmp_path / "d", invite(cluster), "d")  # a member that this test can make calls as
        async with open_channel(a, to_peer(mine, "a")) as channel:
            assert await method(channel, "Ping")(b"x") == b"x"
            for name in ("c", "d"):
                before = len(cluster.events)
                code, printed, errors = command(cluster, "revoke", name, cluster.address)
                assert code == 0, errors
                assert "is cut off" in printed["sentence"]
                cluster.wait_for("revoked", after=before, timeout=1)
            cut = time.monotonic()
            while True:  # until the word has reached a
                try:
                    await method(channel, "Ping")(b"x")
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.PERMISSION_DENIED  # noqa: PT017
                    break
                assert time.monotonic() - cut < 1
        assert revoked.wait(20) == 2
        assert "REVOKED" in revoked.errors
        steps = len(cluster.of("step_committed"))
        cluster.wait_for("step_committed", where=lambda e: e["step"] > steps + 2)
        again = join(cluster, "c", "", on="c")
        assert again.wait(60) == 2
        assert "REVOKED" in again.errors


async def test_a_member_that_poses_as_the_coordinator_is_refused(tmp_path: Path) -> None:
    with Cluster(tmp_path, LONG) as cluster:
        member = await joined(tmp_path / "m", cluster.invitation, "m")
        server = grpc.aio.server(options=server_options())
        port = server.add_secure_port("127.0.0.1:0", coordinator_credentials(member))
        await server.start()
        true = read_invitation(cluster.invitation)
        led_astray = Invitation((f"127.0.0.1:{port}",), true.pin, true.id, true.secret)
        node = join(cluster, "n", str(led_astray))
        assert node.wait(60) == 2
        assert "WRONG_AUTHORITY" in node.errors
        assert "the invitation is of another run, or somebody else answers there" in node.errors
        await server.stop(None)
        assert cluster.of("enrolled") == [e for e in cluster.of("enrolled") if e["name"] != "n"]


@pytest.mark.soak
def test_a_restarted_node_and_a_restarted_coordinator_need_no_new_invitation(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[2], steps=5000, learning_rate=1e-3)
    with Cluster(tmp_path, text, address=f"127.0.0.1:{free_port()}") as cluster:
        for name in ("a", "b"):
            join(cluster, name, invite(cluster))
        cluster.wait_for("step_committed")
        cluster.nodes["b-1"].send(signal.SIGKILL)
        cluster.nodes["b-1"].wait(20)
        begun = len(cluster.events)
        join(cluster, "b", "")  # neither an invitation nor an address
        cluster.wait_for("node_joined", where=lambda e: e["node"] == "b", after=begun)
        cluster.wait_for("plan_started", after=begun)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGKILL)
        cluster.coordinator.wait(20)
        begun = len(cluster.events)
        cluster.start_coordinator()
        for name in ("a", "b"):
            cluster.wait_for("node_joined", where=lambda e, name=name: e["node"] == name, after=begun)  # type: ignore[misc]
        cluster.wait_for("step_committed", after=begun)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
    steps = [e["step"] for e in cluster.of("step_committed")]
    assert steps == list(range(1, len(steps) + 1))
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file, steps=len(steps)), rel=1e-8, abs=0)


@pytest.mark.soak
def test_two_nodes_of_one_machine_come_by_one_invitation_and_each_gets_its_name_back(tmp_path: Path) -> None:
    unnamed = [sys.executable, "-m", "dtfm.node.cli", "join", "--threads", "1", "--device", "cpu"]
    with Cluster(tmp_path, run_file(model=GPT2, stages=[1, 1], steps=5000, learning_rate=1e-3)) as cluster:

        def start(invitation: str) -> Process:
            process = Process(unnamed, tmp_path, environment=machine(cluster, "m", invitation))
            cluster._started.append(("m", process))
            return process

        once = invite(cluster)
        running = [start(once), start(once)]
        cluster.wait_for("step_committed")
        first, second = sorted(e["node"] for e in cluster.of("node_joined"))
        assert second == f"{first}-2"
        for name in (second, first):
            (killed,) = (process for process in running if f" {name}: " in process.errors)
            before = len(cluster.events)
            killed.send(signal.SIGKILL)
            killed.wait(20)
            running.append(start(""))
            assert cluster.wait_for("node_joined", after=before)["node"] == name
            cluster.wait_for("step_committed", after=before)
            running.remove(killed)


@pytest.mark.soak
def test_nodes_find_each_other_long_after_their_first_certificates_have_ended(tmp_path: Path) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=5000, learning_rate=1e-3)
    with Cluster(tmp_path, text, start=False) as cluster:
        cluster._coordinator = "tests.cluster.short_certificates"
        cluster.start_coordinator()
        for name in ("a", "b"):
            cluster.add(name)
        cluster.wait_for("step_committed")
        time.sleep(1.5 * LIFETIME.total_seconds())
        begun = len(cluster.events)
        cluster.add("c")
        cluster.wait_for("node_ready", after=begun)
        (measured,) = (e for e in cluster.of("links_measured") if e["node"] == "c")
        assert [link["problem"] for link in measured["links"]] == [""] * 4  # to a and b, and from them
        cluster.nodes["b"].send(signal.SIGKILL)
        taken_over = cluster.wait_for(
            "plan_adopted", after=begun, where=lambda e: any("c" in stage["replicas"] for stage in e["plan"]["stages"])
        )
        cluster.wait_for("step_committed", where=lambda e: e["generation"] >= taken_over["generation"])


def test_a_viewer_on_another_machine_looks_and_may_do_no_more(tmp_path: Path) -> None:
    with Cluster(tmp_path, LONG, start=False) as cluster:
        cluster.start_coordinator("--web", "0.0.0.0:0")
        cluster.add("a")
        cluster.wait_for("node_joined")
        code, made, errors = command(cluster, "invite", cluster.address, "--role", "viewer", "--name", "Eve")
        assert code == 0, errors
        viewing = str(made["invitation"])
        code, printed, errors = command(cluster, "members", viewing, state="eve")
        assert (code, printed["node"]) == (0, "a"), errors
        code, printed, errors = command(cluster, "members", cluster.address, state="eve")  # remembered
        assert (code, printed["node"]) == (0, "a"), errors
        code, _, errors = command(cluster, "revoke", "a", cluster.address, state="eve")
        assert code == 2
        assert "INVITATION_NEEDED" in errors
        assert "role operator" in errors
        link = urlsplit(made["page"])
        assert answer(link.netloc, "/")[0] == 403
        status, headers = answer(link.netloc, f"/?{link.query}")
        assert status == 200
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert answer(link.netloc, "/state", cookie)[0] == 200
        code, _, errors = command(cluster, "revoke", made["id"], cluster.address)
        assert code == 0, errors
        assert answer(link.netloc, "/state", cookie)[0] == 403


def answer(address: str, path: str, cookie: str = "") -> tuple[int, Message]:
    """The page's, without its content."""
    with closing(HTTPConnection(address, timeout=10)) as connection:
        connection.request("GET", path, headers={"Cookie": cookie})
        answered = connection.getresponse()
        return answered.status, answered.headers


def test_what_was_allowed_once_is_remembered_with_the_membership(tmp_path: Path) -> None:
    """So `dtfm-node join` alone comes back, as after a reboot. What is allowed later takes the place of that."""
    with Cluster(tmp_path, run_file(model=GPT2, stages=[1], steps=5000)) as cluster:
        alone = {"DTFM_INVITATION": "", "DTFM_ALLOW_DATA": ""}
        home = machine(cluster, "a", invite(cluster))
        line = [sys.executable, "-m", "dtfm.node.cli", "join", "--threads", "1", "--device", "cpu"]
        first = Process([*line, "--give-up-after", "20"], tmp_path, environment=home)
        cluster.wait_for("step_committed")
        first.close()
        before = len(cluster.events)
        again = Process(line, tmp_path, environment={**home, **alone})
        cluster.wait_for("step_committed", after=before)
        assert f"As before, the run may use {tmp_path} (--allow-data changes that)" in again.errors
        again.close()
        for said in ({"DTFM_ALLOW_DATA": "/nowhere"}, {}):
            refused = Process(line, tmp_path, environment={**home, **alone, **said})
            assert refused.wait(60) == 2
            assert f"--allow-data '{tmp_path / 'corpus.txt'}'" in refused.errors
