"""An auditor has the time that what it compares takes over the links that there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.coordinator.core.timeouts import AUDIT_LEASES, AUDITORS_FRACTION, STEP_LEASES, audit_patience
from dtfm.coordinator.core.trust.fetching import fetch_seconds
from dtfm.coordinator.log import events as ev
from dtfm.protos import PEER_FRACTION, control_pb2 as wire
from tests.coordinator.audit_scripts import all_vote, auditing, squares
from tests.coordinator.ledgers import altered
from tests.coordinator.script import World


def with_link(world: World, source: str, destination: str, bandwidth: float) -> World:
    links = {each: dict(row) for each, row in world.state.ledger.reach.links.items()}
    links.setdefault(source, {})[destination] = ev.Link(source, destination, 0.01, bandwidth, "")
    world.state = replace(world.state, ledger=altered(world.state.ledger, links=links))
    return world


def test_it_is_what_the_slowest_peer_needs_for_all_that_it_may_be_asked_for() -> None:
    world = auditing("a", "b", "c", "d", planner=squares)
    all_vote(world)
    order = world.last_to("b", "audit")
    assert order.node == "a"
    described = world.state.ledger.described
    assert described is not None
    leaving = described.workload.layers[1].activation_bytes * len(order.micro_batches)
    for source in "acd":
        with_link(world, source, "b", 1e12)
    assert fetch_seconds(with_link(world, "c", "b", 1000.0).state, order, "b") == pytest.approx(leaving / 1000)
    whole = described.workload.layers[order.bucket].parameter_bytes
    assert fetch_seconds(with_link(world, "a", "b", 10.0).state, order, "b") == pytest.approx((leaving + whole) / 10)


def test_a_peer_may_keep_an_auditor_waiting_for_so_long() -> None:
    lease, fetching = 10.0, 15.0
    patience = audit_patience(lease, 1.0, fetching)
    assert patience - AUDIT_LEASES * lease == pytest.approx(fetching / AUDITORS_FRACTION / PEER_FRACTION)


def test_who_says_that_its_links_are_slow_does_not_stretch_steps() -> None:
    assert audit_patience(10.0, 1.0, 1e9) == STEP_LEASES * 10.0


def test_a_request_says_it() -> None:
    world = auditing("a", "b", "c", "d", planner=squares)
    for source in "acd":
        with_link(world, source, "b", 100.0)
    all_vote(world)
    order = wire.Audit()
    order.CopyFrom(world.last_to("b", "audit"))
    needs = fetch_seconds(world.state, order, "b")
    assert needs > 0
    expected = AUDITORS_FRACTION * audit_patience(world.state.lease, 0.0, needs)
    assert order.seconds == pytest.approx(expected, rel=0.05)
