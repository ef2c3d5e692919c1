"""Which stages nobody can audit is said once, when a plan is adopted: `log/unaudited`."""

from __future__ import annotations

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.unaudited import cannot_be_audited, unaudited
from dtfm.coordinator.view.condition.condition import Mood, conditions
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage
from tests.coordinator.script import LEASE, LONG, World, training
from tests.coordinator.strangers import open_run, strangers

ALONE = Plan(1, tuple(Stage((0, 4), (node,), (2,), island=number) for number, node in enumerate("abc")), ((), ()))


def told(world: World) -> list[dict[str, str]]:
    return [event.stages for event in world.events(ev.StagesUnaudited)]


def test_a_stage_that_one_party_holds_is_named_with_its_holder() -> None:
    world = strangers("a", "b", "c", **LONG)
    assert told(world) == [{"stage 1": "c alone holds it"}]
    said = "plan 1: nobody can audit stage 1 (c alone holds it): nodes of other parties there could repeat its work"
    assert world.events(ev.StagesUnaudited)[0].narrate() == said
    condition = conditions(world.view, world.now)[-1]
    assert (condition.mood, condition.text) == (Mood.CARE, said.removeprefix("plan 1: "))


def test_several_names_of_one_party_cannot_audit_each_other() -> None:
    world = World(open_run(4))
    world.belong_together("c", "d")
    for node in "ab":
        world.belong_together(node, key=f"the key of {node}")
    world.join(*"abcd")
    assert told(world) == [{"stage 1": "c, d hold it, all of one party"}]


def test_it_is_said_again_only_if_it_changes() -> None:
    world = strangers("a", "b", "c", **LONG)
    world.fail_step("a", wire.PEER_LOST, peer="c")  # the same plan again, once the link is measured
    world.wait(2 * LEASE, beating="abc")
    world.settle()
    world.step()
    assert len(world.events(ev.PlanAdopted)) > 1
    assert told(world) == [{"stage 1": "c alone holds it"}]
    world.fail_step("a", wire.INTERNAL)
    assert told(world)[1:] == [{"stage 0": "b alone holds it", "stage 1": "c alone holds it"}]


def test_where_all_stages_can_be_audited_or_nothing_is_nothing_is_said() -> None:
    assert told(strangers(*"abcd", **LONG)) == []
    assert told(training("a", "b", "c")) == []


@pytest.mark.parametrize("again", [True, False])
def test_islands_of_one_node_repeat_each_others_steps_where_rounds_begin_alike(again: bool) -> None:
    assert len(unaudited(ALONE, str, again=again)) == (0 if again else 3)
    assert len(unaudited(ALONE, lambda _: "one party", again=again)) == 3


def test_before_a_plan_there_is_nothing_to_audit() -> None:
    assert cannot_be_audited(World(open_run(2)).state.ledger) == {}
