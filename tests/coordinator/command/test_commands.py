"""The commands as people and scripts type them."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from dtfm.coordinator.command.demonstration.demonstration import demo_run_file, new_folder
from dtfm.coordinator.command.invite import read_duration
from dtfm.coordinator.store.store import Store
from dtfm.protos import control_pb2 as wire
from tests.coordinator.command.typed import Typed
from tests.coordinator.script import training
from tests.coordinator.stores import store_url

NETWORK = {
    "nodes": [{"id": name, "region": "x", "flops": 1e12, "memory_bytes": 1e10} for name in ("a", "b")],
    "latency_ms": [[0, 1], [1, 0]],
    "bandwidth_gbps": [[0, 1], [1, 0]],
}
LAYER = {"name": "x", "forward_flops": 1e10, "parameter_bytes": 1e7, "activation_bytes": 1e6}
WORKLOAD = {"layers": [LAYER] * 4, "micro_batches": 4}


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with the log of a run that is under way."""
    world = training("a", "b")
    world.step()
    url = store_url(tmp_path)
    with Store(url, write=True) as opened:
        opened.append(world.whole_log)
    return url


def test_events_print_one_json_object_per_line(store: str, typed: Typed) -> None:
    events = [json.loads(line) for line in typed("events", "--store", store, "--json").splitlines()]
    assert events[0]["event"] == "run_started"
    committed = next(event for event in events if event["event"] == "step_committed")
    assert {key: committed[key] for key in ("step", "generation", "loss", "tokens")} == {
        "step": 1,
        "generation": 1,
        "loss": 0.5,
        "tokens": 128,
    }
    adopted = next(event for event in events if event["event"] == "plan_adopted")
    assert {"generation", "plan", "reason"} <= adopted.keys()
    joined = next(event for event in events if event["event"] == "node_joined")
    assert {"node", "reason"} <= joined.keys()


def test_into_a_pipe_watch_prints_what_a_person_must_know_a_line_each(store: str, typed: Typed) -> None:
    lines = [line.partition("  ")[2] for line in typed("watch", "--store", store).splitlines()]
    assert lines[0].startswith("run demo started")
    assert lines[-1].startswith("step 1: loss 0.5000")
    assert not any("is ready" in line for line in lines)


@pytest.mark.parametrize("json_lines", [True, False])
def test_invitations_are_printed_as_lines_to_paste(
    monkeypatch: pytest.MonkeyPatch, typed: Typed, json_lines: bool
) -> None:
    asked: list[wire.InviteRequest] = []

    async def answer(_where: str, call: str, **fields: Any) -> wire.InviteReply:
        assert call == "Invite"
        asked.append(wire.InviteRequest(**fields))
        id = f"id{len(asked)}"
        return wire.InviteReply(
            id=id, invitation=f"dtfm1.{id}", line=f"join dtfm1.{id} --allow-data /x", leads_to="1.2.3.4:5"
        )

    monkeypatch.setattr("dtfm.coordinator.command.client.ask", answer)
    printed = typed("invite", "--count", "2", *(["--json"] if json_lines else [])).splitlines()
    assert [request.uses for request in asked] == [1, 1]
    if json_lines:
        assert [json.loads(line)["line"] for line in printed] == [f"join dtfm1.id{n} --allow-data /x" for n in (1, 2)]
        assert {json.loads(line)["leads_to"] for line in printed} == {"1.2.3.4:5"}
    else:
        assert [line for line in printed if line.startswith(" ")] == [
            "    join dtfm1.id1 --allow-data /x",
            "    join dtfm1.id2 --allow-data /x",
            "  (leads to 1.2.3.4:5)",
        ]


@pytest.mark.parametrize("page", ["", "http://a:1/?link=b"])
def test_a_viewer_is_told_how_to_open_the_page_or_why_nobody_can_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch, typed: Typed, page: str
) -> None:
    async def answer(_where: str, call: str, **fields: Any) -> wire.InviteReply:
        return wire.InviteReply(id="id", invitation="dtfm1.id", line="watch dtfm1.id", leads_to="1.2.3.4:5", page=page)

    monkeypatch.setattr("dtfm.coordinator.command.client.ask", answer)
    printed = typed("invite", "--role", "viewer")
    assert ("as often as one likes: http://a:1/?link=b\n" in printed) == bool(page)
    assert ("serve --web 0.0.0.0:7480" in printed) == (not page)


@pytest.mark.parametrize("command", ["events", "members", "watch", "check"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_commands_read_a_store_without_a_coordinator(
    command: str, form: tuple[str, ...], store: str, typed: Typed
) -> None:
    printed = typed(command, "--store", store, *form)
    assert printed
    if form:
        assert all(json.loads(line) for line in printed.splitlines())
    path = store.removeprefix("sqlite:///")
    assert typed(command, "--store", path, *form) == printed, "a path names the same store as its URL"


@pytest.mark.parametrize("command", ["events", "members", "watch", "check", "plan-now", "invite"])
def test_commands_say_when_no_coordinator_answers(command: str, typed: Typed) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert "no coordinator answers at 127.0.0.1:" in typed(command, f"127.0.0.1:{free.getsockname()[1]}", code=2)


def test_serve_refuses_a_port_in_use_and_leaves_no_run_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "the port is in use" in typed("serve", "--listen", f"127.0.0.1:{taken.getsockname()[1]}", code=2)
    with Store("sqlite:///dtfm.db", write=False) as opened:
        assert opened.last == 0


def test_serve_overwrites_no_file_that_is_not_an_invitation(
    monkeypatch: pytest.MonkeyPatch, typed: Typed, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[train]\nsteps = 5\n")
    assert "--invitation-file run.toml holds something else, which would be lost" in typed(
        "serve", "run.toml", "--listen", "127.0.0.1:0", "--invitation-file", "run.toml", code=2
    )
    assert Path("run.toml").read_text() == "[train]\nsteps = 5\n"


def test_serve_refuses_a_broken_run_file_before_it_opens_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN.toml").write_text("[train]\nsteps = 0\n")
    assert "train.steps = 0: must be at least 1" in typed("serve", "RUN.toml", code=2)
    assert not (tmp_path / "dtfm.db").exists()


def test_plan_prints_the_schedulers_decision(tmp_path: Path, typed: Typed) -> None:
    (tmp_path / "n.json").write_text(json.dumps(NETWORK))
    (tmp_path / "w.json").write_text(json.dumps(WORKLOAD))
    files = ("plan", "--network", str(tmp_path / "n.json"), "--workload", str(tmp_path / "w.json"))
    printed = json.loads(typed(*files, "--json"))
    assert {"plan", "predicted", "lower_bound_seconds", "reason", "elapsed_seconds"} <= printed.keys()
    assert "stage" in typed(*files)
    typed(*files, "--stages", "3", code=1)
    (tmp_path / "w.json").write_text("{}")
    assert "w.json: layers is missing" in typed(*files, code=2)


def test_the_demo_spreads_its_nodes_over_two_stages(tmp_path: Path) -> None:
    assert [demo_run_file({}, n, None, tmp_path).cluster.pinned for n in (1, 2, 4, 5)] == [(1,), (1, 1), (2, 2), (3, 2)]
    assert demo_run_file({"train": {"rounds": 4}}, 4, 10, tmp_path).cluster.stages == "auto"
    assert demo_run_file({}, 4, 7, tmp_path).train.steps == 7
    assert demo_run_file({}, 4, 7, tmp_path).cluster.wait_for_coordinator == 20, (
        "a demo that was killed leaves no nodes"
    )
    assert demo_run_file({}, 4, None, tmp_path).checkpoint.uri == (tmp_path / "checkpoints").as_uri()
    mine = demo_run_file({"cluster": {"stages": 3}, "checkpoint": {"uri": "memory://x"}}, 4, None, tmp_path)
    assert (mine.cluster.pinned, mine.cluster.nodes, mine.checkpoint.uri) == (3, 4, "memory://x")
    with pytest.raises(ValueError, match=r"cluster.nodes = 2: must be at least 3"):
        demo_run_file({"cluster": {"stages": 3}}, 2, None, tmp_path)


def test_every_demo_gets_its_own_folder(tmp_path: Path) -> None:
    assert new_folder(tmp_path / "demos").name == "1"
    assert new_folder(tmp_path / "demos").name == "2"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="another folder with --dir"):
        new_folder(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "seconds"), [("1s", 1), ("30m", 1800), ("12h", 43_200), ("7d", 604_800), (" 2w ", 1_209_600)]
)
def test_a_duration_is_a_number_with_its_unit(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "1.5h", "1y", "9" * 10 + "s", "1d 2h"])
def test_what_is_no_duration_is_refused_with_an_example(text: str, typed: Typed) -> None:
    assert f"--expires {text!r} is not a time; give it like 30m, 12h or 7d" in typed(
        "invite", f"--expires={text}", code=2
    )


@pytest.mark.parametrize("command", [("members",), ("invite",), ("revoke", "somebody")])
def test_a_damaged_invitation_is_named_and_not_repeated(command: tuple[str, ...], typed: Typed) -> None:
    complaint = typed(*command, "dtfm1.QUJDREVGRw", code=2)
    assert "this invitation is truncated: it has 16 of" in complaint
    assert "QUJD" not in complaint


@pytest.mark.parametrize(("answer", "asked"), [("y\n", [True, False]), ("n\n", [True]), ("\n", [True])])
def test_a_rollback_says_what_is_lost_and_asks_first(
    monkeypatch: pytest.MonkeyPatch, typed: Typed, answer: str, asked: list[bool]
) -> None:
    requests: list[wire.SteerRequest] = []

    async def reply(_where: str, call: str, **fields: Any) -> wire.Done:
        assert call == "Steer"
        requests.append(wire.SteerRequest(**fields))
        return wire.Done(sentence="3 steps would be lost" if fields.get("only_say") else "back at step 2")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("dtfm.coordinator.command.client.ask", reply)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    goes_back = len(asked) > 1
    printed = typed("rollback", "2", code=0 if goes_back else 1)
    assert [request.only_say for request in requests] == asked
    assert {(request.wish, request.step) for request in requests} == {(wire.SteerRequest.ROLLBACK, 2)}
    assert "3 steps would be lost. Go back? [y/N]" in typed.err
    assert not goes_back or printed == "back at step 2.\n"
    assert ("Nothing has changed." in typed.err) != goes_back


def test_a_script_has_to_say_that_it_means_a_rollback(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "say --yes" in typed("rollback", "2", code=2)
