"""Nodes that lose each other again and again are kept apart; nobody is quarantined for what another says."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core.phases import Switching
from dtfm.coordinator.core.state import ATTEMPTS
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from tests.coordinator.accused import goes_on_without, verdicts
from tests.coordinator.script import LONG, World, training


def lose_peers(world: World, *losses: str) -> None:
    """The first of each pair of letters loses the second."""
    for node, peer in map(tuple, losses):
        world.fail_step(node, wire.PEER_LOST, peer=peer)
        if isinstance(world.state.phase, Switching):
            world.settle()


def test_two_that_lose_each_other_three_times_are_kept_apart_and_nobody_is_quarantined() -> None:
    world = training(*"abcd", **LONG)
    lose_peers(world, "ab", "ac", "ba", "ab")
    assert verdicts(world) == []
    assert world.state.ledger.reach.broken == {("a", "b")}


def test_so_are_two_names_of_one_key() -> None:
    """As two devices of one machine that cannot reach each other."""
    world = training(*"abcd", **LONG)
    world.belong_together("a", "b")
    lose_peers(world, "ab", "ab", "ab")
    assert world.state.ledger.reach.broken == {("a", "b")}


def test_two_newcomers_who_name_the_same_one_do_not_throw_it_out() -> None:
    """Each names it as often as it may before their pairs are kept apart."""
    world = training(*"abcd", **LONG)
    lose_peers(world, "ca", "da", "ca", "da", "ca")
    assert verdicts(world) == []
    assert world.state.ledger.reach.broken == {("a", "c"), ("a", "d")}


def test_who_names_others_in_turn_holds_up_a_step_for_five_attempts_at_most() -> None:
    world = training(*"abcdef", **LONG)
    lose_peers(world, "ab", "ac", "ad", "ae")
    assert world.state.ledger.reach.broken == frozenset()
    lose_peers(world, "af")
    assert world.state.ledger.reach.broken == {("a", other) for other in "bcdef"}
    assert verdicts(world) == []


def test_who_names_one_with_which_it_exchanges_nothing_accuses_itself() -> None:
    """As its pair is kept apart already."""
    world = training(*"abcd", **LONG)
    lose_peers(world, "ab", "ab", "ab")
    assert world.state.ledger.reach.broken == {("a", "b")}
    lose_peers(world, "ab", "ab", "ab")  # the script's planner does not look at links
    assert verdicts(world) == [("a", Charge.STEP_FAILED, False)]


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
        assert world.state.ledger.trust.suspicions == ()
    world.fail_step("a", wire.PEER_LOST, peer="d")
    assert verdicts(world) == []
