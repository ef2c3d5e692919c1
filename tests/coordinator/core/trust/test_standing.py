"""Who is one party, and whose word weighs more: `core/trust/verdict.py`."""

from __future__ import annotations

from dtfm.coordinator.core.trust.verdict import weakest
from dtfm.coordinator.log.access import Access, Holder
from dtfm.coordinator.log.events import DeviceSeen, NodeJoined, NodeLeft, Revoked
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.members import Member, recounted
from tests.coordinator.ledgers import altered


def ledger(keys: str, steps: tuple[int, ...] = (), mode: str = "trusted") -> Ledger:
    """Nodes n0, n1, ... joined in this order with these ``keys``, a letter each ("-": not known), and this number of
    ``steps``."""
    nodes = [f"n{number}" for number in range(len(keys))]
    names = {node: Holder(key, "node", "") for node, key in zip(nodes, keys, strict=True) if key != "-"}
    worked = dict(zip(nodes, steps or (0,) * len(nodes), strict=True))
    members = {node: Member("", DeviceSeen("cpu", "", 1, 1.0), "") for node in nodes}
    run = {"trust": {"mode": mode}}
    return recounted(altered(Ledger(), run=run, members=members, access=Access(names), worked=worked))


def test_all_names_of_a_key_are_one_party() -> None:
    party = ledger("kkx-").party
    assert [party(f"n{number}") for number in range(4)] == ["k", "k", "x", "n3"]
    assert party("a name that never came") == "a name that never came"


def test_where_one_key_has_all_nodes_each_counts_for_itself() -> None:
    assert ledger("kkk").is_alone
    assert not ledger("kk-").is_alone
    party = ledger("kkk").party
    assert [party(f"n{number}") for number in range(3)] == ["n0", "n1", "n2"]


def test_nodes_that_are_gone_do_not_count_among_people_who_know_each_other() -> None:
    known = ledger("kkv")
    assert not known.is_alone
    assert NodeLeft("n2", "it was only visiting").apply(known).is_alone


def test_among_strangers_a_node_that_is_gone_counts_until_it_is_revoked() -> None:
    known = NodeLeft("n2", "for the night").apply(ledger("kkv", mode="open"))
    assert not known.is_alone
    assert known.party("n0") == known.party("n1")
    assert Revoked("n2", (), 0.0, "an operator").apply(known).is_alone


def test_a_node_with_fewer_steps_is_weaker_and_then_a_node_that_came_later() -> None:
    assert weakest(ledger("abc", (5, 3, 7)), ["n0", "n1", "n2"]) == "n1"
    assert weakest(ledger("abc", (5, 5, 5)), ["n0", "n1", "n2"]) == "n2"


def test_the_names_of_a_key_do_not_add_up_but_the_best_counts_for_all() -> None:
    assert weakest(ledger("kkb", (4, 1, 5)), ["n1", "n2"]) == "n1"
    assert weakest(ledger("kkb", (6, 1, 5)), ["n1", "n2"]) == "n2"


def test_what_a_node_has_done_is_remembered_until_its_name_is_revoked() -> None:
    known = NodeLeft("n0", "for the night").apply(ledger("abc", (9, 2, 0)))
    known = NodeJoined("n3", "new", "", DeviceSeen("cpu", "", 1, 1.0), "", "1").apply(known)
    assert known.trust.worked == {"n0": 9, "n1": 2, "n2": 0, "n3": 0}
    assert Revoked("n0", (), 0.0, "an operator").apply(known).trust.worked == {"n1": 2, "n2": 0, "n3": 0}
