"""Two of three replicas lie, and find each other's work right. The scheduler itself plans."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.plan.planner_input import measured_cluster
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import fold
from dtfm.scheduler.schedule import schedule
from tests.coordinator.audit_scripts import all_vote, answer_each, quarantined, trains_again
from tests.coordinator.script import LONG
from tests.coordinator.strangers import Planning, open_run

LIARS = ("u", "v")


def answers(accused: str, by: str, *, accusing: bool) -> dict[str, float]:
    """What this auditor says of this node's work. Liars find each other right and, if they are ``accusing``, others wrong."""
    wrong = (accused not in LIARS and accusing) if by in LIARS else accused in LIARS
    return {"activations": 2.0, "gradients": 2.0} if wrong else {}


def trained(honest: str, believed: str = "", *, accusing: bool = False, attempts: int = 40) -> Planning:
    """A run of strangers in two stages where all work is repeated, until no liar is left, or this number of steps was tried."""
    train = {**LONG["train"], "global_batch": 24}
    names, trust = [*honest, *LIARS], {"audit_rate": 1.0}
    cluster = {"stages": [len(names) // 2, len(names) - len(names) // 2]}
    world = Planning(open_run(len(names), **{**LONG, "train": train}, cluster=cluster, trust=trust))
    for node in names:
        world.belong_together(node, key=f"key of {node}", believed=node in believed)
    world.join(*names)
    world.automatic_audits = False
    for _ in range(attempts):
        if not {*LIARS} & world.state.ledger.members.keys():
            break
        trains_again(world)
        all_vote(world)
        answer_each(world, lambda accused, by: answers(accused, by, accusing=accusing))
    return world


def first_stages(world: Planning) -> list[set[str]]:
    return [set(stage.replicas) for stage in world.events(ev.PlanAdopted)[0].plan.stages]


@pytest.mark.parametrize("accusing", [False, True])
@pytest.mark.parametrize("honest", ["abcd", pytest.param("wxyz", marks=pytest.mark.soak)])
def test_among_strangers_both_lose_once_they_have_met_three_others(honest: str, accusing: bool) -> None:
    """At first they have a stage with one honest node: it is not left out for them."""
    world = trained(honest, accusing=accusing)
    assert any({*LIARS} < stage for stage in first_stages(world))
    assert {node for node, _, _ in quarantined(world)} == {*LIARS}


@pytest.mark.parametrize("believed", ["a", "c", "d"])
def test_with_a_believed_node_both_lose(believed: str) -> None:
    world = trained("abcd", believed)
    assert {node for node, _, _ in quarantined(world)} == {*LIARS}


@pytest.mark.parametrize("honest", ["abc", "abcd"])
def test_no_stage_is_left_to_two_nodes_that_agreed_against_a_third(honest: str) -> None:
    """However fast the two are."""
    world, third = trained(honest, attempts=0), honest[0]
    said = [ev.Suspected(1, 1, Charge.AUDIT, (third, liar), "why", (third, liar)) for liar in LIARS]
    ledger = fold([*said, *(ev.DeviceTimed(liar, 2e11) for liar in LIARS)], world.state.ledger)
    cluster = measured_cluster(ledger, [*honest, *LIARS])
    assert ledger.described is not None
    for seed in range(5):
        plan = schedule(cluster, ledger.described.workload, stages=2, evaluations=400, seed=seed).plan
        assert all(set(stage.replicas) & set(honest[1:]) for stage in plan.stages)
        assert not any(third in stage.replicas and {*LIARS} & set(stage.replicas) for stage in plan.stages)
