"""The codecs that nodes choose for their links are checked, logged and shown; a sender chooses again when its link changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import fold
from dtfm.coordinator.view.members import member_documents
from dtfm.coordinator.view.watch import render
from dtfm.protos import control_pb2 as wire
from tests.coordinator.drifting import steady_run, timed_steps
from tests.coordinator.script import World, fresh_state


def link(destination: str, tensors: str, codec: str) -> wire.LinkCodec:
    return wire.LinkCodec(destination=destination, tensors=tensors, codec=codec)


def choose(world: World, codec: str, earlier: int = 0) -> None:
    """a chooses a codec for its tensors to c, under the plan in force, or under a plan ``earlier`` generations before."""
    generation, codecs = world.state.ledger.training.generation - earlier, [link("c", "activations", codec)]
    world.hear("a", codecs_chosen=wire.CodecsChosen(generation=generation, codecs=codecs))


@pytest.fixture
def world() -> World:
    """Layers 0-1 on a and b, 2-3 on c; all micro-batches go from b to c."""
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a", "b", "c")
    world.plan_ready("a", codecs=[link("b", "reduction", "off")])
    world.plan_ready("b", codecs=[link("c", "activations", "i8b256"), link("a", "reduction", "off")])
    return world


def test_the_log_names_the_codec_of_every_link_when_a_plan_begins(world: World) -> None:
    world.plan_ready("c", codecs=[link("b", "gradients", "raw16")])
    (started,) = world.events(ev.PlanStarted)
    assert started.codecs == {
        "a": {"b": {"reduction": "off"}},
        "b": {"c": {"activations": "i8b256"}, "a": {"reduction": "off"}},
        "c": {"b": {"gradients": "raw16"}},
    }
    assert started.narrate() == "plan 1 begins with step 1; codecs of links: i8b256 on 1, off on 2, raw16 on 1"


def test_the_view_shows_the_codec_of_every_link(world: World) -> None:
    world.plan_ready("c", codecs=[link("b", "gradients", "raw16")])
    members = {document["node"]: document for document in member_documents(world.view)}
    assert members["b"]["links"]["c"]["codecs"] == {"activations": "i8b256"}
    assert members["a"]["links"]["c"]["codecs"] == {}
    view = world.view
    console = Console(width=100, height=30)
    with console.capture() as shown:
        console.print(render(view, console))
    lines = shown.get().splitlines()
    for sent, codec in (("b → c", "i8b256"), ("c → b", "raw16"), ("a → b", "off")):
        assert [codec in line for line in lines if sent in line] == [True]
    assert "a → c" not in shown.get()  # the plan sends nothing there


@pytest.mark.parametrize(
    "reported",
    [
        [link("c", "gradients", "off")],
        [link("stranger", "gradients", "off")],
        [link("b", "secrets", "off")],
        [link("b", "gradients", "off"), link("b", "gradients", "raw16")],
        [link("b", "gradients", "OFF; DROP TABLE")],
        [link("b", "gradients", "off")] * 1000,
    ],
)
def test_codecs_of_tensors_that_the_plan_does_not_send_are_refused(
    world: World, reported: list[wire.LinkCodec]
) -> None:
    world.plan_ready("c", codecs=reported)
    assert world.last_to("c", "refusal").reason == wire.MALFORMED


@pytest.mark.parametrize(
    ("network", "codec"),
    [({}, "topk"), ({}, "i4b64"), ({}, "zz"), ({"reduction": "i8b256"}, "off")],
)
def test_a_codec_that_the_run_does_not_use_is_refused(network: dict[str, str], codec: str) -> None:
    """What is said of codecs decides how far audited work may be off."""
    world = World(fresh_state(cluster={"nodes": 3}, network=network))
    world.join("a", "b", "c")
    world.plan_ready("a", codecs=[link("b", "reduction", codec)])
    refusal = world.last_to("a", "refusal")
    assert (refusal.reason, "codecs.codec" in refusal.sentence) == (wire.MALFORMED, True)


def test_a_codec_that_the_run_does_not_use_is_refused_later_too() -> None:
    world = steady_run()
    choose(world, "i4b64")
    assert not world.events(ev.CodecsChosen)


def test_the_sender_on_a_link_that_changed_is_told_and_its_choice_of_codec_is_logged() -> None:
    world = steady_run()
    timed_steps(world, 10, seconds=1.0, arrived=1.0)
    timed_steps(world, 10, seconds=1.0, arrived=4.0)
    (changed,) = world.last_to("a", "links_changed").links
    known = world.state.ledger.reach.links["a"]["c"]
    assert (changed.source, changed.destination, changed.bandwidth) == ("a", "c", known.bandwidth)
    assert "links_changed" not in world.kinds_to("b") + world.kinds_to("c")

    choose(world, "i8b256", earlier=1)
    assert world.events(ev.CodecsChosen) == []
    choose(world, "i8b256")
    (event,) = world.events(ev.CodecsChosen)
    assert world.state.ledger.training.codecs["a"] == {"c": {"activations": "i8b256"}}
    assert event.narrate() == "a now sends to c activations i8b256"


def test_arrivals_under_a_new_codec_are_not_compared_with_earlier_ones() -> None:
    world = steady_run()
    timed_steps(world, 10, seconds=1.0, arrived=1.0)
    timed_steps(world, 10, seconds=1.0, arrived=4.0)
    before = world.state.ledger.reach.links
    choose(world, "i8b256")
    timed_steps(world, 20, seconds=1.0, arrived=16.0)
    assert world.state.ledger.reach.links == before


def test_codecs_that_no_change_of_a_link_asks_for_are_ignored() -> None:
    world = steady_run()
    choose(world, "i8b256")
    assert not world.events(ev.CodecsChosen)
    timed_steps(world, 10, seconds=1.0, arrived=1.0)
    timed_steps(world, 10, seconds=1.0, arrived=4.0)
    for _ in range(3):
        choose(world, "i8b256")
    assert len(world.events(ev.CodecsChosen)) == 1


def test_a_new_plan_forgets_the_codecs_of_the_one_before() -> None:
    world = steady_run()
    ledger = world.state.ledger
    again = ev.PlanAdopted(2, replace(world.plan_in_force, generation=2), "why", 0)
    chosen = ev.CodecsChosen("a", {"c": {"activations": "i8b256"}})
    assert fold([chosen], ledger).training.codecs["a"]
    assert fold([chosen, again], ledger).training.codecs == {}
