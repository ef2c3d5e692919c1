"""Who loses its peers again and again: the link is at fault, or one of its ends, or neither."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.state import ATTEMPTS, Switching
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from tests.coordinator.accused import (
    goes_on_without,
    verdicts,
)
from tests.coordinator.script import LONG, World, training


def lose_peers(world: World, *losses: str) -> None:
    """The first of each pair of letters loses the second."""
    for node, peer in map(tuple, losses):
        world.fail_step(node, wire.PEER_LOST, peer=peer)
        if isinstance(world.state.phase, Switching):
            world.settle()


def test_one_that_loses_several_others_is_left_out_and_not_their_links() -> None:
    world = training(*"abcd", **LONG)
    lose_peers(world, "ab", "ca", "da")
    assert verdicts(world) == [("a", Charge.PEER_LOST, True)]
    assert world.state.ledger.broken == frozenset()
    goes_on_without(world, "a")


def test_a_lossy_link_is_given_up_before_one_of_its_ends_is_blamed_for_it() -> None:
    world = training(*"abcd", **LONG)
    lose_peers(world, "ab", "ac", "ab", "ac")
    assert verdicts(world) == []
    lose_peers(world, "ba")
    assert verdicts(world) == []
    assert world.state.ledger.broken == {("a", "b")}
    lose_peers(world, "ca")
    assert verdicts(world) == [("a", Charge.PEER_LOST, True)]
    goes_on_without(world, "a")


@pytest.mark.parametrize("peer", ["a", "nobody", ""])
def test_a_loss_of_who_is_no_peer_is_ones_own_failure(peer: str) -> None:
    world = training("a", "b", "c", **LONG)
    for _ in range(ATTEMPTS):
        world.fail_step("a", wire.PEER_LOST, peer=peer)
        if isinstance(world.state.phase, Switching):
            world.settle()
    assert verdicts(world) == [("a", Charge.STEP_FAILED, False)]
    goes_on_without(world, "a")


def test_who_has_survived_many_others_is_not_blamed_for_the_losses() -> None:
    world = training("a", "b", "c", "d", **LONG)
    for killed in "bc":
        for _ in range(2):
            world.fail_step("a", wire.PEER_LOST, peer=killed)
            world.settle()
        world.lose(killed)
        world.settle()
        assert world.state.ledger.peer_losses == ()
    world.fail_step("a", wire.PEER_LOST, peer="d")
    assert verdicts(world) == []
