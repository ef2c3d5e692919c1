"""How nodes become a new island: they copy what all islands share, and enter at the first exchange whose sum they have."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.core.timeouts import TOGETHER_LEASES
from dtfm.coordinator.core.transition import TimePassed
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import links
from tests.coordinator.islands import exchange, islands
from tests.coordinator.script import LAYERS, LEASE, World
from tests.coordinator.standbys import caught_up, report


def with_a_newcomer() -> World:
    """Step 1 of a round is over, and c has been asked to copy for an island of its own."""
    world = islands("a", "b")
    world.step()
    world.join("c")
    return world


def measured(world: World, node: str, bandwidth: float) -> None:
    """The node joins, and its links to the others have this bandwidth."""
    world.prepare(node)
    report = links(node, sorted(world.state.ledger.ready))
    for link in report.links.links:
        link.bandwidth = bandwidth
    world.hear(node, report)
    world.now += TOGETHER_LEASES * LEASE
    world.feed(TimePassed())


def pass_patience(world: World) -> None:
    """Lets the time pass that a commit waits."""
    assert world.state.wakes_at is not None
    world.now = world.state.wakes_at
    world.feed(TimePassed())


def test_it_copies_all_layers_from_nodes_that_have_them() -> None:
    asked = with_a_newcomer().last_to("c", "standby")
    assert (asked.first_layer, asked.past_last_layer) == (0, LAYERS)
    assert [list(donors.nodes) for donors in asked.donors] == [["a"], ["a"], ["b"], ["b"]]


@pytest.mark.parametrize(("host_memory", "is_asked"), [(LAYERS * 2**20, True), (LAYERS * 2**20 - 1, False)])
def test_its_host_has_room_for_the_state_that_islands_share(host_memory: int, is_asked: bool) -> None:
    """The parameters of all layers, of 1 MiB each."""
    world = islands("a", "b")
    world.step()
    gpu = wire.Device(kind="cuda", name="a gpu", memory_bytes=1 << 30, flops=1e11, host_memory_bytes=host_memory)
    world.join("c", device=gpu)
    assert ("standby" in world.kinds_to("c")) == is_asked


def test_the_others_go_on_through_exchanges_while_it_copies() -> None:
    world = with_a_newcomer()
    for step in (3, 6):
        exchange(world)
        pass_patience(world)
        assert world.state.ledger.training.step == step
        assert isinstance(world.state.phase, Stepping)
        assert world.plan_in_force.nodes == ("a", "b")


def test_it_enters_with_the_exchange_whose_sum_it_has() -> None:
    world = with_a_newcomer()
    caught_up(world, "c", step=0)
    exchange(world)
    assert world.state.ledger.training.step == 2  # the commit waits for it
    report(world, "c", step=0)
    assert world.state.ledger.training.step == 3
    assert world.last_to("a", "commit").pause
    world.apply()
    assert isinstance(world.state.phase, Switching)
    assert world.state.ledger.training.began == {1: 3}
    assert world.last_to("c", "assignment").island_began == 3
    assert world.last_to("a", "assignment").island_began == 0


def test_without_the_sum_it_waits_for_the_next_exchange() -> None:
    world = with_a_newcomer()
    caught_up(world, "c", step=0)
    exchange(world)
    pass_patience(world)
    assert world.state.ledger.training.step == 3
    assert not world.last_to("a", "commit").pause
    caught_up(world, "c", step=3)
    exchange(world)
    assert world.state.ledger.training.step == 5
    report(world, "c", step=3)
    assert world.state.ledger.training.step == 6
    assert world.last_to("a", "commit").pause


@pytest.mark.parametrize(("bandwidth", "copies"), [(2 << 20, True), (1 << 20, False)])
def test_a_link_must_carry_an_exchanges_sum_in_half_a_round(bandwidth: float, copies: bool) -> None:
    world = islands("a", "b")
    world.now += 1.0
    world.step()  # of a second, with 2 MiB of changes for each stage
    measured(world, "c", bandwidth)
    assert ("standby" in world.kinds_to("c")) == copies


@pytest.mark.parametrize(
    ("codec", "copies"), [("topk", True), ("top64", True), ("i4b64", True), ("i8b256", False), ("off", False)]
)
def test_a_link_carries_the_bytes_of_a_sum_under_its_codec(codec: str, copies: bool) -> None:
    world = islands("a", "b", "c", network={"exchange": codec})
    world.now += 1.0
    for node, samples in {"a": 0, "b": 6, "c": 2}.items():
        world.vote(node, samples=samples, loss_sum=0.5 * samples)
    measured(world, "d", 0.2 * (1 << 20))
    assert ("standby" in world.kinds_to("d")) == copies
