"""The documents that show members."""

from __future__ import annotations

from dtfm.coordinator.view.members import member_documents
from tests.coordinator.script import training


def test_a_member_document_says_what_the_node_computes() -> None:
    world = training("a", "b")
    world.join("c")
    seen = {document["node"]: document for document in member_documents(world.state.ledger)}
    assert (seen["a"]["status"], seen["a"]["stage"], seen["a"]["layers"]) == ("computing", 0, [0, 2])
    assert (seen["c"]["status"], seen["c"]["stage"]) == ("idle", None)
    assert seen["a"]["links"]["b"] == {"latency_seconds": 0.001, "bandwidth": 1e9, "way": "", "codecs": {}}
