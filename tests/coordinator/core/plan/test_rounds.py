"""`[train] rounds = "auto"`: the planner decides with the first plan. If there are rounds, all nodes join again."""

from __future__ import annotations

from typing import Any

from dtfm.coordinator.config.changes import goes_on_with
from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.state import PlanChosen
from dtfm.coordinator.log import events as ev
from dtfm.protos.bucket_layout import LAYOUT_BYTES
from dtfm.scheduler.model.rounds import Rounds, fitting
from tests.coordinator.core.test_steering import set_key
from tests.coordinator.script import BUCKETS, World, fresh_state, prepared, two_stages
from tests.coordinator.stores import checked

AUTO: dict[str, Any] = {"rounds": "auto", "steps": 1000, "evaluate_every": 0}


def answered(rounds: int | None) -> World:
    """A world in which a and b have come, and the planner has answered the first question with these rounds."""
    world = World(fresh_state(train=AUTO, cluster={"nodes": 2, "stages": "auto"}))
    world.automatic_planning = False
    world.join("a", "b")
    (wanted,) = world.wanted
    world.wanted = []
    assert (wanted.choices, wanted.rounds) == (fitting(1000), Rounds(0))
    world.feed(t.Planned(wanted.number, PlanChosen(two_stages(["a", "b"]), "islands pay", 1.0, 0.5, rounds)))
    return world


def test_with_rounds_all_nodes_join_again_and_say_anew_what_they_train() -> None:
    world = answered(24)
    (changed,) = world.events(ev.RunChanged)
    assert changed.narrate() == "the planner set train.rounds to 24; it was auto. islands pay"
    assert {left.reason for left in world.events(ev.NodeLeft)} == {"it joins again, as train.rounds has changed"}
    assert world.hung_up == set(world.streams.values())
    assert isinstance(world.state.phase, Gathering)
    layouts = [bytes([7, bucket]).ljust(LAYOUT_BYTES) for bucket in range(BUCKETS)]  # with rounds a bucket holds more
    for node in "ab":
        world.prepare(node, prepared(layouts=b"".join(layouts)))
        world.report_links(node)
        assert world.last_to(node, "welcome").run.train.rounds == 24
    assert not world.refusals
    assert world.state.ledger.described is not None
    assert world.state.ledger.described.layout_of(1) == layouts[1].hex()
    assert (world.wanted[-1].choices, world.wanted[-1].rounds) == (None, Rounds(24))
    assert world.refolded().run == world.state.run.model_dump(mode="json")


def test_without_rounds_the_plan_is_adopted_at_once() -> None:
    world = answered(0)
    assert world.events(ev.RunChanged)[0].value == 0
    assert not world.hung_up
    assert world.plan_in_force.nodes == ("a", "b")
    assert world.state.rounds == Rounds(0)


def test_what_was_decided_stays_through_a_restart_and_is_what_the_log_is_checked_by() -> None:
    world = answered(24)
    file, started = fresh_state(train=AUTO, cluster={"nodes": 2, "stages": "auto"}).run, world.whole_log[0]
    assert isinstance(started, ev.RunStarted)
    assert goes_on_with(file, started.run, world.state.ledger.run, 0).train.rounds == 24
    committed = [ev.StepCommitted(step, 0, 0.5, 112, 2.0, 1.0, 8, {}, {}) for step in range(1, 26)]
    assert checked(world.records).findings == ()
    world.log += committed
    assert "step 25 is no exchange, against the run's rounds" in [
        each.sentence for each in checked(world.records).findings
    ]


def test_an_answer_for_another_number_of_steps_decides_nothing() -> None:
    world = World(fresh_state(train=AUTO, cluster={"nodes": 2, "stages": "auto"}))
    world.automatic_planning = False
    world.join("a", "b")
    assert "777" in set_key(world, "train.steps", 777)
    world.feed(t.Planned(world.wanted.pop(0).number, PlanChosen(two_stages(["a", "b"]), "islands pay", rounds=24)))
    assert world.state.run.train.rounds == "auto"
    assert world.wanted[-1].choices == fitting(777)
