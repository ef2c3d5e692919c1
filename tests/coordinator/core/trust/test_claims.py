"""What members claim, and what of that counts: `core/trust/claims.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.coordinator.core.plan.planner_input import measured_cluster
from dtfm.coordinator.core.trust.claims import counted_flops
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.members import Member
from dtfm.coordinator.log.trust import Audits
from tests.coordinator.ledgers import altered

PROVEN, NEW = 3, 0


def ledger(mode: str, **nodes: tuple[str, float, int]) -> Ledger:
    """Nodes, each with its kind of device, the FLOP/s that it claims, and the number of audits that have found its work right."""
    members = {
        node: Member("", ev.DeviceSeen(kind, "", 1 << 33, flops), "") for node, (kind, flops, _) in nodes.items()
    }
    audits = {node: Audits(clean, 1) for node, (*_, clean) in nodes.items() if clean}
    links = {a: {b: ev.Link(a, b, 0.01, 1e8) for b in nodes if b != a} for a in nodes}
    return altered(Ledger(), run={"trust": {"mode": mode}}, members=members, audits=audits, links=links)


def counted(mode: str, **nodes: tuple[str, float, int]) -> list[float]:
    return counted_flops(ledger(mode, **nodes), list(nodes))


def test_among_people_who_know_each_other_a_claim_counts() -> None:
    assert counted("trusted", a=("cpu", 1e11, NEW), b=("cpu", 1e13, NEW)) == [1e11, 1e13]


def test_where_nobody_is_proven_claims_count_but_for_outliers() -> None:
    assert counted("open", a=("cpu", 1e11, NEW), b=("cpu", 9e11, NEW)) == [1e11, 9e11]
    assert counted("open", a=("cpu", 1e11, NEW), b=("cpu", 2e11, NEW), c=("cpu", 1e13, NEW)) == [1e11, 2e11, 2e11]
    assert counted("open", a=("cpu", 1e11, NEW), b=("cuda", 1e13, NEW)) == [1e11, 1e11]
    two_gpus = {"b": ("cuda", 1e13, NEW), "c": ("cuda", 2e13, NEW)}
    assert counted("open", a=("cpu", 1e11, NEW), **two_gpus) == [1e11, 1e13, 2e13]


def test_once_some_are_proven_a_claim_counts_for_twice_what_they_show_and_more_with_each_audit() -> None:
    def share(claim: float, audits: int) -> float:
        (proven, share) = counted("open", a=("cpu", 1e11, PROVEN), b=("cpu", claim, audits))
        assert proven == 1e11
        return share

    assert [share(1e13, audits) for audits in range(4)] == pytest.approx([1e11, 4 / 3 * 1e11, 5 / 3 * 1e11, 2e11])
    assert [share(1e11, audits) for audits in range(4)] == pytest.approx(
        [1 / 2 * 1e11, 2 / 3 * 1e11, 5 / 6 * 1e11, 1e11]
    )


def test_a_proven_ones_claim_is_measured_by_other_proven_ones_as_audits_do_not_show_how_fast_it_is() -> None:
    assert counted("open", a=("cpu", 1e11, PROVEN), b=("cpu", 1e13, PROVEN)) == [1e11, 2e11]
    assert counted("open", a=("cpu", 1e11, PROVEN), b=("cpu", 1e13, PROVEN), c=("cpu", 1e13, PROVEN)) == [
        1e11,
        1e13,
        1e13,
    ]


def test_twice_of_what_a_node_has_shown_counts_in_any_case() -> None:
    known = ledger("open", a=("cpu", 1e11, PROVEN), b=("cpu", 1e13, PROVEN))
    members = {**known.members, "b": replace(known.members["b"], shown=2e12)}
    assert counted_flops(replace(known, members=members), ["a", "b"]) == [1e11, 4e12]


def test_a_kind_of_device_without_proven_nodes_counts_for_its_own_median() -> None:
    gpus = {"b": ("cuda", 1e13, NEW), "c": ("cuda", 4e13, NEW), "d": ("cuda", 1e16, NEW)}
    assert counted("open", a=("cpu", 1e11, PROVEN), **gpus) == [1e11, 0.5e13, 2e13, 2e13]


def test_links_of_unproven_nodes_count_for_at_most_twice_the_fastest_between_proven_nodes() -> None:
    known = ledger("open", a=("cpu", 1e11, PROVEN), b=("cpu", 1e11, PROVEN), c=("cpu", 1e11, NEW))
    claimed = {**known.reach.links, "c": {"a": ev.Link("c", "a", 0.01, 1e12), "b": ev.Link("c", "b", 0.01, 5e7)}}
    known = altered(Ledger(), run=known.run, members=known.members, audits=known.trust.audits, links=claimed)
    cluster = measured_cluster(known, ["a", "b", "c"])
    assert cluster.bandwidth.tolist() == [[0, 1e8, 1e8], [1e8, 0, 1e8], [2e8, 5e7, 0]]
    assert [node.proven for node in cluster.nodes] == [True, True, False]
    nobody = measured_cluster(altered(Ledger(), run=known.run, members=known.members, links=claimed), ["a", "b", "c"])
    assert nobody.bandwidth[2, 0] == 1e12
