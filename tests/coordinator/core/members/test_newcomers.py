"""From welcome to ready: what a new member prepares, and when it is let in (`prepared` and after in `members/membership.py`)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.state.session import Admission
from dtfm.coordinator.core.step.telling import awaited
from dtfm.coordinator.core.timeouts import TOGETHER_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.access import Access, Holder
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import links
from tests.coordinator.script import LEASE, World, fresh_state, prepared, refusal_of, training


def test_the_first_prepared_node_defines_the_run_and_probes_nobody() -> None:
    world = World()
    world.prepare("a")
    assert world.state.ledger.described is not None
    assert world.state.ledger.described.workload.micro_batches == 4
    assert world.state.members.sessions["a"].admission is Admission.ARRIVED
    assert world.kinds_to("a") == ["welcome"]


def told_of_the_data(world: World, node: str) -> bytes:
    world.prepare(node, prepared(data_read=False))
    return world.heard_by(node)[0].welcome.data_fingerprint


def with_keys(**keys: str) -> World:
    """By name, whose it is."""
    world = World()
    access = Access({name: Holder(key, "node", "") for name, key in keys.items()})
    world.state = replace(world.state, ledger=replace(world.state.ledger, access=access))
    return world


@pytest.mark.parametrize("described_by", ["", "revoked"])
def test_a_reader_whose_key_is_not_known_is_no_other_one(described_by: str) -> None:
    """Older logs do not say who described the run, and of a revoked name no key is left: it may have been this one's."""
    world = with_keys(a="one", b="another")
    world.prepare("a", prepared(data_read=True))
    world.state = replace(world.state, ledger=replace(world.state.ledger, described_by=described_by))
    world.prepare("b", prepared(data_read=True))
    assert not world.events(ev.DataConfirmed)


def test_newcomers_are_told_what_the_data_is_once_two_nodes_have_read_it() -> None:
    """One node alone could make a run learn what it likes: nobody would look at the source again."""
    world = with_keys(a="one", b="another", c="a third")
    world.prepare("a", prepared(data_read=True))
    assert told_of_the_data(world, "believes") == b""
    assert told_of_the_data(world, "believes too") == b""
    world.prepare("a", prepared(data_read=True), incarnation=2)  # the same one again
    assert told_of_the_data(world, "late") == b""
    assert not world.events(ev.DataConfirmed)
    world.prepare("b", prepared(data_read=True))
    world.prepare("c", prepared(data_read=True))
    assert world.events(ev.DataConfirmed) == [ev.DataConfirmed("b")]
    assert told_of_the_data(world, "latest") == b"fingerprint"
    assert world.heard_by("latest")[0].welcome.unigram_entropy == 3.0


def test_two_names_of_one_key_are_one_opinion_on_the_data() -> None:
    world = with_keys(**{"a": "one", "a-2": "one", "b": "another"})
    world.prepare("a", prepared(data_read=True))
    world.prepare("a-2", prepared(data_read=True))
    assert not world.events(ev.DataConfirmed)
    world.prepare("b", prepared(data_read=True))
    assert world.events(ev.DataConfirmed) == [ev.DataConfirmed("b")]


def test_a_nodes_speed_is_what_it_measured_on_this_runs_layers() -> None:
    world = World()
    world.prepare("a", prepared(flops=3e9))
    assert world.events(ev.DeviceTimed) == [ev.DeviceTimed("a", 3e9)]
    assert world.state.ledger.members["a"].device.flops == 3e9
    again = wire.Device(kind="cpu", name="a cpu", memory_bytes=1 << 33, flops=3e9)
    world.prepare("a", prepared(flops=3e9), device=again)
    assert len(world.events(ev.DeviceTimed)) == 1


@pytest.mark.parametrize("flops", [math.nan, -1.0, 1e30])
def test_an_impossible_speed_is_refused(flops: float) -> None:
    world = World()
    stream = world.prepare("a", prepared(flops=flops))
    assert "flops is" in refusal_of(world, stream).sentence
    assert world.state.ledger.described is None


def test_newcomers_that_arrive_together_become_ready_together() -> None:
    world = World(fresh_state(cluster={"nodes": 9}))
    for node in ("a", "b", "c"):
        world.prepare(node)
        world.hear(node, links(node, []))
        world.now += LEASE * TOGETHER_LEASES / 2
        world.feed(t.TimePassed())
        assert world.state.ledger.ready == ()
    world.now += LEASE * TOGETHER_LEASES / 2
    world.feed(t.TimePassed())
    assert world.state.ledger.ready == ("a", "b", "c")


def test_nobody_waits_for_more_newcomers_once_the_run_has_the_nodes_it_asks_for() -> None:
    world = World()
    world.prepare("a")
    world.prepare("b")
    world.hear("b", links("b", ["a"]))
    assert world.names()[-1] == "plan_adopted"


def test_forty_nodes_that_join_at_once_get_one_plan() -> None:
    world = training("a", "b")
    newcomers = [f"n{number:02d}" for number in range(40)]
    for node in newcomers:
        world.prepare(node)
        world.hear(node, links(node, ["a", "b"]))
        world.now += 1 / len(newcomers)
        world.feed(t.TimePassed())
    world.wait(LEASE / 4, beating=["a", "b", *newcomers])
    world.step()
    world.apply()
    assert [set(adopted.plan.nodes) for adopted in world.events(ev.PlanAdopted)] == [{"a", "b"}, {"a", "b", *newcomers}]


def test_a_stream_of_newcomers_is_let_in_at_least_once_a_lease() -> None:
    world = World(fresh_state(cluster={"nodes": 1000}))
    for number in range(30):
        node = f"n{number}"
        world.prepare(node)
        world.hear(node, links(node, []))
        world.wait(LEASE * TOGETHER_LEASES * 0.9, beating=list(world.state.members.sessions))
    assert 20 <= len(world.state.ledger.ready) < 30


def test_what_newcomers_do_is_said_and_logged_once_in_each_tenth() -> None:
    world = World()
    world.greet("a")
    world.greet("b")
    for thousandths in range(0, 1001):
        world.hear("a", beat(wire.READING_DATA, thousandths, 1000))
    world.hear("a", beat(wire.LOADING_MODEL))  # a late report of earlier work
    world.hear("b", beat(wire.MEASURING_LINKS, 5, 7))
    said = [event.narrate() for event in world.events(ev.NodePrepares)]
    assert said == [f"a reads data ({tenth * 10} %)" for tenth in range(11)] + ["b measures links (5 of 7)"]
    assert awaited(world.state) == "0 of 2 nodes are ready; a reads data (100 %), b measures links (5 of 7)"
    assert world.refolded().members["a"].preparing == "reads data (100 %)"


@pytest.mark.parametrize(
    "said",
    [
        wire.Heartbeat(preparing=wire.NOTHING_TO_SAY, done=1, of=2),
        wire.Heartbeat(preparing=99, done=1, of=2),  # type: ignore[arg-type]
    ],
)
def test_a_heartbeat_that_says_nothing_is_a_sign_of_life_alone(said: wire.Heartbeat) -> None:
    world = World()
    world.greet("a")
    world.hear("a", wire.NodeMessage(heartbeat=said))
    assert not world.events(ev.NodePrepares)


@pytest.mark.parametrize(
    ("done", "of", "sentence"), [(9, 7, "7 of 7"), (5, 0, ""), (2**32 - 1, 2**32 - 1, "10000 of 10000")]
)
def test_numbers_that_cannot_be_are_cut(done: int, of: int, sentence: str) -> None:
    world = World()
    world.greet("a")
    world.hear("a", beat(wire.MEASURING_LINKS, done, of))
    (said,) = world.events(ev.NodePrepares)
    assert said.sentence == f"measures links ({sentence})" if sentence else "measures links"


def test_a_node_that_is_ready_prepares_nothing() -> None:
    world = training("a", "b")
    world.hear("a", beat(wire.READING_DATA, 1, 2))
    assert not world.events(ev.NodePrepares)


def beat(doing: wire.Preparing, done: int = 0, of: int = 0) -> wire.NodeMessage:
    return wire.NodeMessage(heartbeat=wire.Heartbeat(preparing=doing, done=done, of=of))
