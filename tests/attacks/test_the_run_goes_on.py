"""One node of three says what would have ended the run: it is quarantined for a lie, or left out, and the others finish, with the
losses of an honest run. Each node belongs to somebody else."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.attacks.twisted import FROM, PEERS
from tests.cluster.launch import Cluster, Event
from tests.cluster.runs import GPT2, losses_alone, run_file
from tests.cluster.test_islands import text

LIAR = "liar"
STEPS = 6

OPEN = 'mode = "open"\naudit_rate = 0'


def twisted(twist: str, name: str, command: list[str]) -> list[str]:
    """The command of a liar with its twist; the other nodes' commands, unchanged."""
    if not name.startswith(LIAR):
        return command
    at = command.index("dtfm.node.cli")
    return [*command[:at], "tests.attacks.twisted", twist, *command[at + 1 :]]


def attacked(
    folder: Path,
    twist: str,
    names: Sequence[str],
    lease: float = 2.0,
    steps: int = STEPS,
    trust: str = 'mode = "trusted"',
    believed: str = "",
) -> Cluster:
    """A run of three replicas or more, with nodes of these names. ``trust``: the run file's table. ``believed``: the node of
    whoever runs the coordinator."""
    text = run_file(model=GPT2, stages=[max(3, len(names))], steps=steps, lease=lease)
    return Cluster(
        folder,
        f"{text}[trust]\n{trust}\n",
        place=lambda name, command: twisted(twist, name, command),
        nodes=names,
        invited={*names} - {believed},
        liars=True,
    )


def is_of(name: str, event: Event) -> bool:
    return bool(event["node"] == name)


def has_part(name: str, committed: Event) -> bool:
    return name in committed["compute_seconds"]


def the_others_finish(cluster: Cluster, charge: str, steps: int = STEPS) -> None:
    assert cluster.finish() == 0
    assert [(e["node"], e["charge"]) for e in cluster.of("node_quarantined")] == [(LIAR, charge)]
    assert "QUARANTINED" in cluster.nodes[LIAR].errors
    assert len(cluster.losses) == steps
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)


@pytest.mark.parametrize(
    ("twist", "charge"),
    [
        ("another_digest", "DIGEST"),
        *(
            pytest.param(twist, charge, marks=pytest.mark.soak)  # found like those above
            for twist, charge in [("too_many_samples", "SAMPLE_COUNT"), ("another_norm", "GRADIENT_NORM")]
        ),
    ],
)
def test_a_liar_among_three_replicas_is_quarantined_and_the_others_finish(
    tmp_path: Path, twist: str, charge: str
) -> None:
    with attacked(tmp_path, twist, (*PEERS, LIAR)) as cluster:
        the_others_finish(cluster, charge)
        committed = [event["step"] for event in cluster.of("step_committed")]
        assert committed == list(range(1, STEPS + 1)), "nobody went back"
        assert not cluster.of("run_failed")
        assert cluster.of("node_quarantined")[0]["step"] == FROM - 1


@pytest.mark.parametrize(
    ("twist", "problem"),
    [
        ("nan", "NON_FINITE"),
        *(
            pytest.param(twist, problem, marks=pytest.mark.soak)
            for twist, problem in [
                ("huge_loss", "NON_FINITE"),
                ("no_plan_suits", "PLAN_FAILED"),
                ("votes_for_nothing", "OVERDUE"),
            ]
        ),
    ],
)
def test_the_others_finish_without_one_that_says_or_shows_that_it_cannot_and_nobody_is_accused(
    tmp_path: Path, twist: str, problem: str
) -> None:
    with attacked(tmp_path, twist, (*PEERS, LIAR)) as cluster:
        assert cluster.finish() == 0
    assert {(e["node"], e["problem"]) for e in cluster.of("node_out_of_use")} == {(LIAR, problem)}
    assert cluster.of("node_quarantined") == cluster.of("suspected") == cluster.of("run_failed") == []
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)


def test_who_says_that_it_loses_everybody_throws_nobody_out_and_the_others_finish(tmp_path: Path) -> None:
    """It names the others in turn. Nobody else goes on its word; once it is kept apart from all, plans do without it."""
    with attacked(tmp_path, "loses_peers", (*PEERS, LIAR)) as cluster:
        assert cluster.finish() == 0
        assert {event["node"] for event in cluster.of("node_quarantined")} <= {LIAR}
        assert len(cluster.of("step_aborted")) <= 8
        assert not has_part(LIAR, cluster.of("step_committed")[-1])
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)


STRANGERS = 'mode = "open"\naudit_rate = 1.0'


@pytest.mark.soak
@pytest.mark.parametrize("twist", ["denies_one", "loses_peers"])
def test_two_newcomers_who_name_the_same_one_throw_out_none_of_four(tmp_path: Path, twist: str) -> None:
    """Plans keep each liar apart from the nodes that it contradicts, until no node is left for it, or it is quarantined."""
    liars = {LIAR, f"{LIAR}-2"}
    with attacked(tmp_path, twist, (*PEERS, "c", "d", *sorted(liars)), trust=STRANGERS) as cluster:
        assert cluster.finish() == 0
        assert {event["node"] for event in cluster.of("node_quarantined")} <= liars
        assert all(liars.intersection(event["nodes"]) for event in cluster.of("suspected"))
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)


@pytest.mark.soak
def test_whom_the_coordinators_own_node_contradicts_goes_at_once(tmp_path: Path) -> None:
    """Among strangers, and with one voice alone."""
    with attacked(tmp_path, "denies_one", (*PEERS, LIAR), trust=STRANGERS, believed=PEERS[0]) as cluster:
        the_others_finish(cluster, "HOP")
        assert "a believed node" in cluster.of("node_quarantined")[0]["reason"]
        assert len(cluster.of("step_aborted")) == 1


@pytest.mark.soak
def test_who_sends_nan_and_says_that_all_is_well_is_found(tmp_path: Path) -> None:
    """All who get something of it say so, from the first step on."""
    with attacked(tmp_path, "spoils", (*PEERS, LIAR)) as cluster:
        assert cluster.finish() == 0
        suspected = cluster.of("suspected")
        assert suspected
        assert all(LIAR in event["nodes"] for event in suspected)
        assert {event["node"] for event in cluster.of("node_quarantined")} <= {LIAR}
        assert not any(has_part(LIAR, event) for event in cluster.of("step_committed"))
        assert cluster.losses == pytest.approx(losses_alone(cluster.run_file), rel=1e-9)


@pytest.mark.soak
def test_what_one_of_four_adds_thirty_times_over_is_clipped_in_an_open_run_and_the_log_says_whose(
    tmp_path: Path,
) -> None:
    with attacked(tmp_path, "poisons", (*PEERS, "c", LIAR), steps=20, trust=OPEN) as cluster:
        assert cluster.finish() == 0
    clipped = cluster.of("gradients_clipped")
    assert len(clipped) >= 19
    for event in clipped:
        honest = {by: whose for by, whose in event["times"].items() if by != LIAR}
        assert set(honest) == {*PEERS, "c"}
        assert all(set(whose) == {LIAR} for whose in honest.values())


@pytest.mark.soak
@pytest.mark.parametrize("lost", [1, 2])
def test_who_hands_out_wrong_state_is_named_and_newcomers_get_it_from_others(tmp_path: Path, lost: int) -> None:
    """One bit of each bucket is wrong, with the right checksum. If two newcomers say so, it is quarantined."""
    dying = ("x", "y")[:lost]
    with attacked(tmp_path, "gives_wrong_state", (*PEERS, LIAR, *dying), 5.0, steps=100_000) as cluster:
        cluster.wait_for("step_committed", where=lambda event: event["step"] >= 3)
        for name in dying:
            cluster.nodes[name].send(signal.SIGKILL)
        for name in dying:
            cluster.wait_for("node_left", where=partial(is_of, name))
        cluster.wait_for("step_committed", where=lambda e: has_part(LIAR, e) and not any(has_part(n, e) for n in dying))
        newcomers = ["m", "n"][:lost]
        for name in newcomers:
            cluster.add(name)
        for name in newcomers:
            cluster.wait_for("step_committed", where=partial(has_part, name), timeout=100)
        # Each gets most of its state over its fastest link, which may lead to the liar. It takes another's place: for
        # one node more there may be no use.
        for name in "opqrst":
            if any(event["charge"] == "STATE" for event in cluster.of("suspected")):
                break
            cluster.nodes[newcomers[-1]].send(signal.SIGKILL)
            cluster.wait_for("node_left", where=partial(is_of, newcomers[-1]))
            newcomers.append(name)
            cluster.add(name)
            cluster.wait_for("step_committed", where=partial(has_part, name), timeout=100)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
    suspected = [event for event in cluster.of("suspected") if event["charge"] == "STATE"]
    assert suspected
    assert all(LIAR in event["nodes"] and set(event["nodes"]) <= {LIAR, *newcomers} for event in suspected)
    assert {event["node"] for event in cluster.of("node_quarantined")} <= {LIAR}
    assert not cluster.of("digest_mismatch")
    assert not cluster.of("rolled_back")
    steps = [event["step"] for event in cluster.of("step_committed")]
    assert steps == list(range(1, len(steps) + 1))
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file, steps=len(steps)), rel=1e-8)


@pytest.mark.soak
def test_a_checkpoint_whose_manifest_was_replaced_is_refused_for_the_one_before(tmp_path: Path) -> None:
    """By somebody who may write to the storage, while nobody has the state in memory or on disk."""
    text = run_file(model=GPT2, stages=[len(PEERS)], steps=300, learning_rate=1e-3, checkpoint_every=10)
    with Cluster(tmp_path, text, nodes=PEERS, invited=True) as cluster:
        cluster.wait_for("checkpoint_written", where=lambda event: event["step"] >= 30)
        cluster.wait_for("state_agreed", where=lambda event: event["step"] >= 30)
        assert cluster.coordinator is not None
        for process in (cluster.coordinator, *cluster.nodes.values()):
            process.send(signal.SIGKILL)
            process.wait(10)
        newest = max(event["step"] for event in cluster.of("checkpoint_written"))
        manifest = tmp_path / "checkpoints" / f"step-{newest:08d}" / "manifest.json"
        manifest.write_text(manifest.read_text().replace("  ", " "))
        resumed = len(cluster.events)
        cluster.start_coordinator()
        for name in PEERS:
            cluster.add(name, environment={"XDG_CACHE_HOME": str(tmp_path / f"new-{name}")})
        assert cluster.finish(timeout=400) == 0
        assert [event["step"] for event in cluster.events[resumed:] if event["event"] == "rolled_back"][-1] < newest
    failed = [event for event in cluster.of("plan_failed") if event["snapshot_damaged"]]
    assert {event["node"] for event in failed} == set(PEERS)
    assert "not the one that the coordinator wrote" in failed[0]["reason"]
    alone = losses_alone(cluster.run_file)
    for event in cluster.of("step_committed"):
        assert event["loss"] == pytest.approx(alone[event["step"] - 1], rel=1e-9, abs=0)


@pytest.mark.soak
@pytest.mark.parametrize("twist", ["writes_wrong_state", "renames"])
def test_who_writes_another_file_than_the_other_replicas_is_found_by_it(tmp_path: Path, twist: str) -> None:
    """Its file goes to no checkpoint, and the last one can be exported."""
    text = run_file(model=GPT2, stages=[3], steps=40, checkpoint_every=10, lease=2.0, precision="fp32")
    place = partial(twisted, twist)
    with Cluster(tmp_path, text, place=place, nodes=(*PEERS, LIAR), invited=True, liars=True) as cluster:
        assert cluster.finish() == 0
    assert [(event["node"], event["charge"]) for event in cluster.of("node_quarantined")] == [(LIAR, "SNAPSHOT")]
    assert cluster.of("checkpoint_written")[-1]["step"] == 40
    export = [sys.executable, "-m", "dtfm.coordinator.cli", "export", "--store", cluster.store, str(tmp_path / "model")]
    subprocess.run(export, check=True, timeout=60)
    assert cluster.losses[-1] == pytest.approx(losses_alone(cluster.run_file)[-1], rel=1e-4)


@pytest.mark.soak
def test_an_idle_node_that_meddles_is_ignored(tmp_path: Path) -> None:
    with attacked(tmp_path, "meddles", (*PEERS, "c"), steps=100_000) as cluster:
        cluster.wait_for("step_committed")
        cluster.add(LIAR)
        cluster.wait_for("node_ready", where=lambda event: event["node"] == LIAR)
        done = len(cluster.losses)
        cluster.wait_for("step_committed", where=lambda event: event["step"] >= done + 15)
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
        assert not cluster.of("step_aborted")
        assert not cluster.of("checkpoint_failed")
        assert not cluster.of("plan_failed")


def test_an_island_that_comes_out_of_an_exchange_with_another_state_is_found_and_the_others_finish(
    tmp_path: Path,
) -> None:
    """Between two exchanges nobody could tell: each island has weights of its own."""
    names = ("a1", "b1", LIAR)
    with Cluster(
        tmp_path,
        text(8, nodes=names),
        coordinator="tests.cluster.drawn",
        place=partial(twisted, "drifts"),
        nodes=names,
        invited=True,
        liars=True,
    ) as cluster:
        assert cluster.finish() == 0
    assert [(e["node"], e["charge"]) for e in cluster.of("node_quarantined")] == [(LIAR, "DIGEST")]
    mismatch = cluster.of("digest_mismatch")[0]
    assert (mismatch["step"], set(mismatch["digests"])) == (5, set(names))
    assert [e["step"] for e in cluster.of("step_committed")][-1] == 8
    (found,) = cluster.check().findings
    assert "held different state of stage 0 at step 5" in found.sentence
