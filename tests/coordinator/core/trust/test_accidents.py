"""Whoever is slow, cannot be reached or leaves by accident while audits go on is not accused of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, strategies as st

from dtfm.coordinator.core.phases import Stepping
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from tests.coordinator.audit_scripts import (
    all_vote,
    asked,
    asked_for,
    auditing,
    auditor_of,
    come_back,
    quarantined,
    replicas,
    trains_again,
)
from tests.coordinator.honest_work import audited
from tests.coordinator.script import LONG, World, fresh_state


def test_neighbours_that_cannot_be_reached_or_are_slow_are_never_charged_nor_are_their_auditors() -> None:
    world = auditing("a", "b", "c", "d")
    for step in range(1, 13):
        all_vote(world)
        while world.state.ledger.training.step < step:
            accused, by = next((of, by[0]) for of, by in asked(world).items() if by)
            order = world.last_to(by, "audit")
            others = sorted(addend.node for each in order.sums for addend in each.addends if addend.node != by)
            assert order.node == accused
            world.audit(by, withheld_by=others[0], problem="WITHHELD", unreachable=True)
    assert not quarantined(world)
    assert not [
        event for event in world.events(ev.Suspected) if event.charge is Charge.WITHHELD and len(event.nodes) > 1
    ]


def test_who_leaves_by_accident_while_it_is_audited_is_not_accused() -> None:
    """Its auditors have got the same result, or are called off before they have a result."""
    world = auditing("a", "b", "c")
    for times in range(8):
        all_vote(world)
        asked_for(world, "c")
        by = auditor_of(world, "c")
        order = world.last_to(by, "audit")
        world.lose("c")
        if times % 2:
            world.hear(by, audited(order))
        come_back(world, "c")
        world.automatic_audits = False
    assert not quarantined(world)
    assert not [
        event for event in world.events(ev.Suspected) if event.charge is Charge.WITHHELD and len(event.nodes) > 1
    ]


@given(st.integers(3, 5), st.binary(min_size=32, max_size=32), st.data())
def test_honest_nodes_that_come_and_go_are_never_accused(count: int, secret: bytes, data: st.DataObject) -> None:
    """Nor if a link between two of them is too slow for audits now and then."""
    names = "abcdef"[:count]
    state: State = fresh_state(**LONG, trust={"audit_rate": 0.3}, cluster={"nodes": count})
    world = World(replace(state, secret=secret), replicas)
    world.join(*names)
    world.settle()
    world.automatic_audits = False
    for _ in range(12):
        all_vote(world)
        leaver = data.draw(st.sampled_from([None, None, None, *names]))
        if leaver is not None:
            world.automatic_audits = True
            world.lose(leaver)
            trains_again(world)
            world.join(leaver)
            world.automatic_audits = False
        else:
            answers(world, data)
        trains_again(world)
    assert not quarantined(world)


def answers(world: World, data: st.DataObject) -> None:
    step = world.state.ledger.training.step
    while world.state.ledger.training.step == step and isinstance(world.state.phase, Stepping) and asked(world):
        for accused, by in list(asked(world).items()):
            for node in by:
                order = world.last_to(node, "audit")
                slow = order.node == accused and data.draw(st.integers(0, 20)) == 0
                changes: dict[str, Any] = {"problem": "SLOW: it took too long"} if slow else {}
                if node in asked(world).get(accused, ()):
                    world.audit(node, **changes)
