"""Who is one party, and whose word weighs more: `core/trust/standing.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.coordinator.core.trust.standing import is_alone, party_of, weakest
from dtfm.coordinator.log import trust
from dtfm.coordinator.log.access import Access, Holder
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.events import DeviceSeen, NodeJoined, NodeLeft, NodeQuarantined, Revoked
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.members import Member
from dtfm.scheduler.model.plan import Stage, from_routes
from tests.coordinator.ledgers import altered


def ledger(keys: str, steps: tuple[int, ...] = (), *quarantined: NodeQuarantined) -> Ledger:
    """Nodes n0, n1, ... came in this order with these ``keys``, a letter each ("-": none is known), and did so many ``steps``."""
    nodes = [f"n{number}" for number in range(len(keys))]
    names = {node: Holder(key, "node", "") for node, key in zip(nodes, keys, strict=True) if key != "-"}
    worked = dict(zip(nodes, steps or (0,) * len(nodes), strict=True))
    members = {node: Member("", DeviceSeen("cpu", "", 1, 1.0), "") for node in nodes}
    return altered(
        Ledger(),
        members=members,
        access=Access(names),
        worked=worked,
        quarantined={why.key or why.node: why for why in quarantined},
    )


def undecided(node: str, against: str, *, weighed: bool = True) -> NodeQuarantined:
    return NodeQuarantined(node, Charge.DIGEST, "why", 1, undecided=True, against=(against,), weighed=weighed)


def test_all_names_of_a_key_are_one_party() -> None:
    party = party_of(ledger("kkx-"))
    assert [party(f"n{number}") for number in range(4)] == ["k", "k", "x", "n3"]
    assert party("a name that never came") == "a name that never came"


def test_where_one_key_has_all_nodes_each_counts_for_itself() -> None:
    assert is_alone(ledger("kkk"))
    assert not is_alone(ledger("kk-"))
    party = party_of(ledger("kkk"))
    assert [party(f"n{number}") for number in range(3)] == ["n0", "n1", "n2"]


def test_who_is_gone_does_not_count() -> None:
    known = NodeLeft("n2", "it was only visiting").apply(ledger("kkv"))
    assert is_alone(known)
    assert not is_alone(altered(known, plan=from_routes(1, [Stage((0, 1), ("n0", "n2"), ())], [])))


def test_among_strangers_who_is_gone_counts_if_it_has_done_a_step() -> None:
    known = replace(ledger("kkvw", (5, 5, 1, 0)), run={"trust": {"mode": "open"}})
    for node in ("n2", "n3"):
        known = NodeLeft(node, "for the night").apply(known)
    assert not is_alone(known)
    party = party_of(known)
    assert party("n0") == party("n1")
    assert is_alone(altered(known, worked={"n0": 5, "n1": 5, "n3": 0}))
    assert is_alone(Revoked("n2", (), 0.0, "an operator").apply(known))


def test_who_has_done_fewer_steps_is_weaker_and_then_who_came_later() -> None:
    assert weakest(ledger("abc", (5, 3, 7)), ["n0", "n1", "n2"]) == "n1"
    assert weakest(ledger("abc", (5, 5, 5)), ["n0", "n1", "n2"]) == "n2"


def test_the_names_of_a_key_do_not_add_up_but_the_best_counts_for_all() -> None:
    assert weakest(ledger("kkb", (4, 1, 5)), ["n1", "n2"]) == "n1"
    assert weakest(ledger("kkb", (6, 1, 5)), ["n1", "n2"]) == "n2"


def test_newcomers_do_not_crowd_out_what_others_have_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "MOST_KNOWN", 5)
    known = NodeLeft("n0", "for the night").apply(ledger("abcd", (9, 0, 0, 0)))
    for number in range(4, 8):
        known = NodeJoined(f"n{number}", "new", "", DeviceSeen("cpu", "", 1, 1.0), "", "1").apply(known)
        known = NodeLeft(f"n{number}", "it was only visiting").apply(known)
        assert known.trust.worked == {"n0": 9, "n1": 0, "n2": 0, "n3": 0, f"n{number}": 0}
    known = NodeLeft("n2", "for the night").apply(known)
    known = NodeJoined("n8", "new", "", DeviceSeen("cpu", "", 1, 1.0), "", "1").apply(known)
    assert list(known.trust.worked) == ["n0", "n1", "n2", "n3", "n8"]


def test_whose_standing_had_another_quarantined_is_weaker_than_all_others() -> None:
    known = ledger("abc", (500, 1, 1), undecided("gone", against="n0"))
    assert weakest(known, ["n0", "n1"]) == "n0"


def test_to_be_one_of_those_who_outvoted_another_costs_nothing() -> None:
    known = ledger("abc", (500, 1, 1), undecided("gone", against="n0", weighed=False))
    assert weakest(known, ["n0", "n1"]) == "n1"
