"""Islands as real processes: each loss equals one process's with as many copies of the model, through kills and joins."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dtfm.coordinator.log.events import StepCommitted
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.store.store import Store
from dtfm.protos.outer import OuterStep
from dtfm.protos.plan_pb2 import Run
from dtfm.protos.run_file.run_file import read_run_file
from tests.cluster.faults import COORDINATOR, HOLD, SIGKILL, Fault, Phase, announcement, fail
from tests.cluster.launch import Cluster
from tests.cluster.plain import losses_of_islands, scheduled_rate
from tests.cluster.runs import GPT2, run_file

ROUNDS = 3
NODES = ("a1", "b1", "b2", "c1")


def text(
    steps: int,
    checkpoint_every: int = 0,
    nodes: Sequence[str] = NODES,
    rounds: str = str(ROUNDS),
    *,
    by_trying: bool = False,
) -> str:
    outer = 'outer_rate = "auto"\n' if by_trying else "outer_rate = 0.7\nouter_momentum = 0.9\n"
    made = run_file(model=GPT2, stages=[len(nodes)], steps=steps, checkpoint_every=checkpoint_every).replace(
        "[train]\n", f"[train]\nrounds = {rounds}\n{outer}"
    )
    return made.replace(f"stages = [{len(nodes)}]\n", "")


def shares_by_step(cluster: Cluster) -> Mapping[int, Mapping[int, Sequence[int]]]:
    """By step that counts, the micro-batches of the run that each island trains: in order, but what an island that is missing had
    trained since the last exchange comes again first. Each comes once, except the lost ones."""
    plans = {event["generation"]: event["plan"] for event in cluster.of("plan_adopted")}
    committed = {event["step"]: event for event in cluster.log() if event["event"] == "step_committed"}
    new, again, trained, lost = itertools.count(), list[int](), dict[int, list[int]](), list[int]()
    found: dict[int, Mapping[int, Sequence[int]]] = {}
    for step, event in committed.items():
        stages = [stage for stage in plans[event["generation"]]["stages"] if stage["layers"][0] == 0]
        gone = trained.keys() - {stage["island"] for stage in stages}
        lost += (these := [number for island in gone for number in trained.pop(island)])
        again = sorted([*again, *these])
        if event["exchange"]:
            found[step] = {stage["island"]: range(sum(stage["loads"])) for stage in stages}
            trained.clear()
            continue
        order = itertools.chain(again, new)
        found[step] = {stage["island"]: [*itertools.islice(order, sum(stage["loads"]))] for stage in stages}
        taken = [number for numbers in found[step].values() for number in numbers]
        again = again[len(taken) :]
        if plans[event["generation"]]["rounds"]["count"]:
            for island, numbers in found[step].items():
                trained.setdefault(island, []).extend(numbers)
    trains = [step for step, event in committed.items() if not event["exchange"]]
    every = sorted(number for step in trains for numbers in found[step].values() for number in numbers)
    assert sorted([*every, *again]) == sorted([*range(next(new)), *lost])
    return found


def began_by_step(cluster: Cluster) -> Mapping[int, Mapping[int, int]]:
    """By step that counts, the step after which an island began with moments of zero, where that is not the first."""
    ledger, found = Ledger(), dict[int, Mapping[int, int]]()
    with Store(cluster.store, write=False) as store:
        for record in store.read():
            ledger = record.event.apply(ledger)
            if isinstance(record.event, StepCommitted):
                found[record.event.step] = ledger.training.began
    return found


def moments_by_step(cluster: Cluster) -> Mapping[int, Mapping[int, int]]:
    """By step, and by island that began before it within a round, the island whose moments it began with."""
    taken = {event["generation"]: event["moments"] for event in cluster.of("plan_adopted")}
    found, begun = dict[int, Mapping[int, int]](), dict[int, int]()
    for event in cluster.log():
        if event["event"] == "plan_started":
            begun |= {int(island): source for island, source in taken[event["generation"]].items()}
        if event["event"] == "step_committed":
            found[event["step"]], begun = begun, {}
    return found


def assert_exact_islands(cluster: Cluster, tolerance: float = 1e-8, rolled_back: int = 0) -> None:
    run = read_run_file(cluster.run_file).message("any")
    run.data.source = str(cluster.folder / run.data.source)
    shares = shares_by_step(cluster)
    committed = [event for event in cluster.log() if event["event"] == "step_committed"]
    losses = {event["step"]: event["loss"] for event in committed}
    batches = {event["step"]: event["samples"] // run.train.global_batch for event in committed}
    done = dict(zip(batches, itertools.accumulate(size or 1 for size in batches.values()), strict=True))
    last = next(step for step in done if done[step] >= run.train.steps)
    assert [*losses] == [*range(1, last + 1)]
    with_rounds = {event["generation"] for event in cluster.of("plan_adopted") if event["plan"]["rounds"]["count"]}
    exchanges = {event["step"]: event["exchange"] for event in committed if event["generation"] in with_rounds}
    held_out: dict[int, float] = {}
    outers = {event["step"]: OuterStep(**event["outer"]) for event in committed if event["exchange"]}
    began = began_by_step(cluster).__getitem__
    moments = moments_by_step(cluster).__getitem__

    def rate(run: Run, step: int) -> float:
        return scheduled_rate(run, done[step]) * math.sqrt(batches[step])

    outer = lambda step, _: outers[step]  # noqa: E731
    alone = losses_of_islands(
        run, shares.__getitem__, exchanges.get, held_out, began, outer=outer, moments=moments, rate=rate
    )
    for step in losses:
        assert losses[step] == pytest.approx(next(alone), rel=tolerance, abs=0), f"step {step}"
    told = {event["step"]: event["loss"] for event in cluster.log() if event["event"] == "evaluated"}
    assert told[last] == pytest.approx(held_out[last], rel=tolerance, abs=0)
    assert cluster.check().findings == ()
    assert len(cluster.of("rolled_back")) == rolled_back


def islands(cluster: Cluster) -> list[list[list[str]]]:
    """Of the last plan, island by island, the replicas of each stage."""
    found: dict[int, list[list[str]]] = {}
    for stage in cluster.of("plan_adopted")[-1]["plan"]["stages"]:
        found.setdefault(stage["island"], []).append(stage["replicas"])
    return [*found.values()]


@pytest.mark.parametrize(
    ("nodes", "rounds"),
    [
        pytest.param(("a1", "a2", "b1"), str(ROUNDS), marks=pytest.mark.soak),
        (NODES, '"auto"'),
        pytest.param(("a1", "br1", "br2", "c1", "d1", "d2", "e1"), str(ROUNDS), marks=pytest.mark.soak),
    ],
)
def test_islands_train_what_one_process_with_as_many_copies_does(
    tmp_path: Path, nodes: Sequence[str], rounds: str
) -> None:
    """Also where the planner decides that there are rounds."""
    run = text(12, nodes=nodes, rounds=rounds)
    with Cluster(tmp_path, run, coordinator="tests.cluster.drawn", nodes=nodes) as cluster:
        assert cluster.finish() == 0
        assert len(islands(cluster)) == len({name[0] for name in nodes})
        assert_exact_islands(cluster)
        assert cluster.coordinator is not None
        assert "ignored" not in cluster.coordinator.errors
        assert not any("failed" in node.errors for node in cluster.nodes.values())


@pytest.mark.soak
def test_a_batch_that_grows_with_the_islands_is_trained_exactly_through_deaths_and_a_restart(tmp_path: Path) -> None:
    """Within the round in which an island dies, the others train as many samples; then the batch is smaller."""
    faults = [
        fail("c1").at(step=6, phase=Phase.FORWARD).by(SIGKILL),
        fail(COORDINATOR).at(step=9, phase=Phase.COMMIT).by(SIGKILL),
    ]
    run = text(48).replace("[train]\n", "[train]\nbatch_grows = true\n")
    with Cluster(tmp_path, run, coordinator="tests.cluster.drawn", nodes=NODES, faults=faults) as cluster:
        assert cluster.coordinator is not None
        cluster.coordinator.wait_for_error(announcement(faults[1]))
        cluster.coordinator.wait(10)
        cluster.start_coordinator()
        assert cluster.finish() == 0
        assert_exact_islands(cluster)
        committed = [event for event in cluster.log() if event["event"] == "step_committed"]
        sizes = [event["samples"] * 3 // committed[0]["samples"] for event in committed if not event["exchange"]]
        assert sizes == sorted(sizes, reverse=True)
        assert {*sizes} == {3, 2}


@pytest.mark.soak
def test_islands_try_outer_steps_and_a_killed_island_leaves_the_choice_to_the_others(tmp_path: Path) -> None:
    """All apply what the log names, also whoever joins later."""
    fault = fail("c1").at(step=8, phase=Phase.REDUCE).by(SIGKILL)
    run = text(24, by_trying=True)
    with Cluster(tmp_path, run, coordinator="tests.cluster.drawn", nodes=NODES, faults=[fault]) as cluster:
        cluster.wait_for("node_left")
        cluster.add("c2")
        assert cluster.finish() == 0
        assert_exact_islands(cluster)
        exchanges = [event for event in cluster.of("step_committed") if event["exchange"]]
        assert exchanges[0]["looked"] is None, "the warm-up has 4 steps"
        assert exchanges[1]["looked"] is not None
        assert all(len(event["looked"]["steps"]) == 3 for event in exchanges if event["looked"])


@pytest.mark.soak
def test_islands_that_exchange_their_largest_changes_alone_train_what_one_process_with_such_copies_does(
    tmp_path: Path,
) -> None:
    """Except at the ends of the codec's blocks."""
    made = text(12).replace("[network]\n", '[network]\nexchange = "topk"\n')
    with Cluster(tmp_path, made, coordinator="tests.cluster.drawn", nodes=NODES) as cluster:
        assert cluster.finish() == 0
        assert len(islands(cluster)) == 3
        assert_exact_islands(cluster, tolerance=0.01)


@pytest.mark.soak
@pytest.mark.parametrize(
    "fault",
    [
        fail("c1").at(step=6, phase=Phase.FORWARD).by(SIGKILL),
        fail("c1").at(step=8, phase=Phase.REDUCE).by(SIGKILL),
    ],
)
def test_an_island_that_is_lost_is_given_up_until_the_next_exchange(tmp_path: Path, fault: Fault) -> None:
    with Cluster(tmp_path, text(60), coordinator="tests.cluster.drawn", nodes=NODES, faults=[fault]) as cluster:
        cluster.wait_for("node_left")
        newcomer = cluster.add("c2")
        cluster.wait_for("plan_adopted", where=lambda event: "c2" in str(event["plan"]["stages"]))
        assert cluster.finish() == 0
        assert len(islands(cluster)) == 3
        assert_exact_islands(cluster)
        adopted = [event["step"] for event in cluster.of("plan_adopted") if "c2" in str(event["plan"]["stages"])]
        assert [*began_by_step(cluster)[60].values()] == adopted
        assert cluster.check().owed == 0
        assert "had trained come again" in str(cluster.of("plan_adopted"))
        # It had copied all before: nobody waited for its state.
        assert "standby: 6 of 6 buckets are taken over" in newcomer.errors


@pytest.mark.soak
def test_rounds_begin_once_somebody_is_there_to_exchange_with_and_end_once_nobody_is(tmp_path: Path) -> None:
    with Cluster(tmp_path, text(60, rounds='"auto"', nodes=("a1",)), coordinator="tests.cluster.drawn") as cluster:
        cluster.add("a1")
        cluster.wait_for("step_committed", where=lambda event: event["step"] == 3)
        cluster.add("b1")
        cluster.wait_for("plan_started", where=lambda _: len(islands(cluster)) == 2)
        seen = len(cluster.events)
        cluster.wait_for("step_committed", where=lambda event: bool(event["exchange"]), after=seen)
        cluster.nodes["b1"].send(signal.SIGKILL)
        assert cluster.finish() == 0
        plans = [event["plan"] for event in cluster.of("plan_adopted")]
        kinds = [(plan["rounds"]["count"] > 0, len(plan["stages"])) for plan in plans]
        assert [kind for kind, _ in itertools.groupby(kinds)] == [
            (False, 1),
            (True, 2),
            (True, 1),  # until the next exchange
            (False, 1),
        ]
        assert_exact_islands(cluster)


def test_an_island_goes_on_without_a_replica_that_is_killed_and_learns_from_the_same_step_on(tmp_path: Path) -> None:
    nodes, fault = ("a1", "br1", "br2"), fail("br1").at(step=6, phase=Phase.BACKWARD).by(SIGKILL)
    run = text(12, nodes=nodes)
    with Cluster(tmp_path, run, coordinator="tests.cluster.drawn", nodes=nodes, faults=[fault]) as cluster:
        assert cluster.finish() == 0
        assert islands(cluster) == [[["a1"]], [["br2"]]]
        assert_exact_islands(cluster)
        assert not began_by_step(cluster)[12], "nothing that it had learnt was lost"


@pytest.mark.soak
def test_who_is_left_of_an_island_begins_anew_and_gets_another_node_with_the_moments_of_its_layers(
    tmp_path: Path,
) -> None:
    fault = fail("b1").at(step=6, phase=Phase.BACKWARD).by(SIGKILL)
    with Cluster(tmp_path, text(60), coordinator="tests.cluster.drawn", nodes=NODES, faults=[fault]) as cluster:
        cluster.wait_for("node_left")
        cluster.add("b3")
        cluster.wait_for("plan_adopted", where=lambda event: "b3" in str(event["plan"]["stages"]))
        assert cluster.finish() == 0
        assert_exact_islands(cluster)
        (began,) = began_by_step(cluster)[60].values()
        grown = next(event for event in cluster.of("plan_adopted") if "b3" in str(event["plan"]["stages"]))
        assert grown["step"] > began  # so that there were moments, which b3 needed


@pytest.mark.soak
def test_who_is_left_of_a_pipeline_trains_again_within_the_round_with_a_node_that_is_free(tmp_path: Path) -> None:
    """p1 and p2 are two stages. All wait until p3 is there: otherwise the round might be over before it has started."""
    nodes, hold = ("a1", "c1", "p1", "p2"), fail("a1").at(step=5, phase=Phase.FORWARD).by(HOLD)
    faults = [fail("p1").at(step=3, phase=Phase.BACKWARD).by(SIGKILL), hold]
    run = text(62, nodes=nodes, rounds="30").replace("lease = 5.0", "lease = 30.0")  # a1 is no hung node
    with Cluster(tmp_path, run, coordinator="tests.cluster.drawn", nodes=nodes, faults=faults) as cluster:
        cluster.wait_for("node_left")
        cluster.add("p3")
        cluster.wait_for("node_ready", where=lambda event: event["node"] == "p3")
        cluster.let_go(hold)
        begun = cluster.wait_for("plan_started", where=lambda _: any(["p3"] in stages for stages in islands(cluster)))
        assert 3 < begun["step"] < 31
        adopted = cluster.of("plan_adopted")[-1]
        assert [*adopted["moments"].values()] in ([0], [1])
        assert len(adopted["plan"]["counted"]["had"]) == 2, "what p1 and p2 had trained is lost, and comes again"
        assert cluster.finish() == 0
        assert sorted(map(len, islands(cluster))) == [1, 1, 2]
        assert_exact_islands(cluster)


@pytest.mark.soak
@pytest.mark.parametrize(("step", "rounds"), [(6, str(ROUNDS)), (8, '"auto"')])
def test_a_coordinator_that_is_killed_finds_the_islands_as_they_were(tmp_path: Path, step: int, rounds: str) -> None:
    """Also where the planner has decided that there are rounds."""
    fault, run = fail(COORDINATOR).at(step=step, phase=Phase.COMMIT).by(SIGKILL), text(12, rounds=rounds)
    with Cluster(tmp_path, run, coordinator="tests.cluster.drawn", nodes=NODES, faults=[fault]) as cluster:
        assert cluster.coordinator is not None
        cluster.coordinator.wait(60)
        cluster.start_coordinator()
        assert cluster.finish() == 0
        assert_exact_islands(cluster)


@pytest.mark.soak
def test_islands_whose_machines_have_all_started_anew_go_on_from_a_snapshot(tmp_path: Path) -> None:
    fault = fail(COORDINATOR).at(step=30, phase=Phase.COMMIT).by(SIGKILL)
    run = text(40, checkpoint_every=8)
    with Cluster(tmp_path, run, coordinator="tests.cluster.drawn", nodes=NODES, faults=[fault]) as cluster:
        assert cluster.coordinator is not None
        cluster.coordinator.wait(60)
        for node in cluster.nodes.values():
            node.send(signal.SIGKILL)
            node.wait(10)
        cluster.start_coordinator()
        for name in NODES:
            cluster.add(name)
        assert cluster.finish() == 0
        assert cluster.of("rolled_back")[0]["step"] in (8, 16, 24)
        assert_exact_islands(cluster, rolled_back=1)


@pytest.mark.soak
def test_a_copy_for_a_new_island_is_no_state_for_one_that_goes_on_from_a_snapshot(tmp_path: Path) -> None:
    """Such a copy has no weights and no moments: an island begins with the weights of its anchor."""
    hold = fail("a1").at(step=7, phase=Phase.FORWARD).by(HOLD)
    run = text(12, checkpoint_every=ROUNDS + 1, nodes=("a1",)).replace(
        "lease = 5.0", "lease = 30.0"
    )  # a1 is no hung node
    with Cluster(tmp_path, run, coordinator="tests.cluster.drawn", nodes=["a1"], faults=[hold]) as cluster:
        cluster.wait_for("checkpoint_written", where=lambda event: event["step"] == ROUNDS + 1)
        cluster.add("b1").wait_for_error("are copied as of step")
        cluster.nodes["a1"].send(signal.SIGKILL)
        assert cluster.finish() == 0
    (back,) = cluster.of("rolled_back")
    assert (back["from_step"], back["step"]) == (6, 4)
    losses = [event["loss"] for event in cluster.of("step_committed")]
    assert losses[4:6] == pytest.approx(losses[6:8], rel=1e-9)
