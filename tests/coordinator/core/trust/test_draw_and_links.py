"""An auditor that does not reach whom it has to ask is drawn only if there is no other."""

from __future__ import annotations

from random import Random

from hypothesis import given, strategies as st

from dtfm.coordinator.core.trust.draw import Drawn, draw
from dtfm.scheduler.model.plan import Plan
from tests.coordinator.core.trust.test_draw import itself, plan_of


def drawn(plan: Plan, seed: int, *broken: tuple[str, str]) -> dict[str, Drawn]:
    found = draw(plan, 1.0, Random(seed), itself, plan.nodes, apart=frozenset(broken))
    return {each.node: each for each in found}


@given(st.integers(0, 2**32))
def test_who_does_not_reach_a_neighbour_of_the_audited_node_does_not_audit_it(seed: int) -> None:
    plan = plan_of([3, 1])
    found = drawn(plan, seed, ("0b", "1a"))
    assert {node: each.by for node, each in found.items() if each.by == "0b"} == {}
    assert found.keys() == {"0a", "0b", "0c"}


@given(st.integers(0, 2**32))
def test_a_link_that_no_audit_needs_changes_nothing(seed: int) -> None:
    plan = plan_of([3, 3, 1])
    assert drawn(plan, seed, ("0b", "2a")) == drawn(plan, seed)


@given(st.integers(0, 2**32))
def test_if_nobody_reaches_it_somebody_is_asked_all_the_same(seed: int) -> None:
    """So nobody gets round audits by saying that its links are broken."""
    plan = plan_of([3, 1])
    assert drawn(plan, seed, ("0a", "1a"), ("0b", "1a"), ("0c", "1a")) == drawn(plan, seed)
