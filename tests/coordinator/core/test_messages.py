"""The messages that nodes get about a plan: `core/messages.py`."""

from __future__ import annotations

from dtfm.coordinator.core.messages import assignments
from dtfm.coordinator.core.validation.admission import MAX_NODES
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import fold
from dtfm.protos import control_pb2 as wire
from dtfm.protos.clipping import clip_coefficient
from dtfm.protos.connection import MAX_MESSAGE_BYTES
from dtfm.scheduler.model.plan import Stage, from_routes
from tests.coordinator.every_event import DESCRIBED, DEVICE
from tests.coordinator.script import fresh_state, training


def test_a_node_learns_the_links_that_begin_at_it() -> None:
    world = training("a", "b", "c")
    for node, others in (("a", ["b", "c"]), ("b", ["a", "c"]), ("c", ["a", "b"])):
        links = world.last_to(node, "assignment").links
        assert [(link.source, link.destination) for link in links] == [(node, other) for other in others]
        assert {link.bandwidth for link in links} == {1e9}


def test_a_node_that_missed_the_last_commit_learns_of_it_with_the_next_plan() -> None:
    world = training("a", "b", "c")
    assert not world.last_to("a", "assignment").HasField("last_commit")
    world.step()
    committed = world.events(ev.StepCommitted)[-1]
    world.lose("a")
    for node in ("b", "c"):
        assignment = world.last_to(node, "assignment")
        factor = clip_coefficient(committed.gradient_norm, 1.0)
        commit = wire.Commit(
            generation=1,
            step=1,
            learning_rate=committed.learning_rate,
            weight_decay=0.1,
            clips=[wire.Commit.Clip(first_layer=at, past_last_layer=at + 2, factor=factor) for at in (0, 2)],
        )
        assert (assignment.step, assignment.last_commit) == (1, commit)


def test_after_going_back_a_plan_names_no_last_commit() -> None:
    world = training()
    world.step()
    world.lose("b")
    world.join("b2")
    assert world.events(ev.RolledBack)
    assert not world.last_to("a", "assignment").HasField("last_commit")


def test_an_assignment_of_the_largest_plan_fits_into_a_message() -> None:
    """Names of 40 characters, all links measured."""
    names = [f"a-machine-with-a-rather-long-name-{number:06d}" for number in range(MAX_NODES)]
    half = MAX_NODES // 2
    stages = (Stage((0, 1), tuple(names[:half]), ()), Stage((1, 2), tuple(names[half:]), ()))
    links = [(names[a], names[half + (a + b) % half]) for a in range(half) for b in range(4)]
    plan = from_routes(1, stages, [(link, 1000) for link in links])
    ledger = fold(
        [
            ev.RunDescribed(DESCRIBED),
            *[ev.NodeJoined(name, "first contact", "203.0.113.200:65000", DEVICE) for name in names],
            ev.LinksMeasured(names[0], tuple(ev.Link(names[0], name, 0.0123, 1.23e9) for name in names[1:])),
            ev.PlanAdopted(1, plan, "why", 0),
        ],
        fresh_state().ledger,
    )
    [(_, message)] = assignments(ledger, "why", names[:1], {}, wire.SnapshotSource())
    assert len(message.assignment.links) == MAX_NODES - 1
    assert message.ByteSize() < MAX_MESSAGE_BYTES / 4
