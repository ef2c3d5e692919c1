"""Whose data the run trains on until the first plan: the coordinator's own copies, then the most parties (describing.py)."""

from __future__ import annotations

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.source_files import RANGE_DIGEST, SourceFile
from tests.coordinator.script import World, fresh_state, prepared, refusal_of


def file(content: str, key: str = "data.source", name: str = "train.jsonl") -> SourceFile:
    digest = content.encode().hex().ljust(64, "0")
    return SourceFile(key, name, 8192, digest, 4096, "00" * RANGE_DIGEST + digest[: 2 * RANGE_DIGEST])


def read(text: str, *, files: bool = True) -> wire.NodeMessage:
    """What a node says that has read this text."""
    its = [file(text).message] if files else []
    return prepared(data_fingerprint=text.encode().ljust(32), data_read=True, files=its)


def world_of(*nodes: str, open: bool = False) -> World:
    """The nodes have joined, each with a key of its own."""
    world = World(fresh_state(cluster={"nodes": 9}, trust={"mode": "open" if open else "trusted"}))
    for node in nodes:
        world.belong_together(node, key=f"key of {node}")
        world.greet(node)
    return world


def says(world: World, node: str, message: wire.NodeMessage) -> None:
    world.feed(t.Heard(world.streams[node], message))


def fingerprint(world: World) -> str:
    assert world.state.ledger.described is not None
    return bytes.fromhex(world.state.ledger.described.data_fingerprint).decode().strip()


DIFFERS = "data.source: train.jsonl differs; the first byte that differs is from byte 4,096 to 8,191"


def test_the_first_to_describe_the_data_does_not_overrule_two_who_agree() -> None:
    world = world_of("a", "b", "c")
    says(world, "a", read("wrong"))
    says(world, "b", read("right"))
    assert world.events(ev.NodePrepares)[-1] == ev.NodePrepares("b", "waits for a second opinion")
    says(world, "c", read("right"))
    assert fingerprint(world) == "right"
    refusal = refusal_of(world, world.streams["a"])
    assert refusal.reason == wire.DATA_DIFFERS
    assert refusal.sentence.startswith(DIFFERS)
    assert {*world.state.members.sessions} == {"b", "c"}
    assert all(session.prepared is None for session in world.state.members.sessions.values())
    assert world.state.ledger.data_confirmed
    dropped = world.events(ev.DescriptionDropped)[0]
    assert dropped.narrate() == (
        "a's description of the model and the data is dropped, as 2 parties have read other data, and 1 the same"
    )
    assert world.refolded() == world.state.ledger


def test_one_against_one_the_first_counts_and_the_other_is_told_which_byte_differs() -> None:
    world = world_of("a", "b", "c")
    says(world, "a", read("right"))
    says(world, "b", read("wrong"))
    says(world, "c", read("right"))
    assert fingerprint(world) == "right"
    refusal = refusal_of(world, world.streams["b"])
    assert refusal.reason == wire.DATA_DIFFERS
    assert refusal.sentence.startswith(DIFFERS)


def test_a_node_waits_no_longer_than_somebody_else_may_decide() -> None:
    world = world_of("a", "b", "c")
    says(world, "a", read("right"))
    says(world, "b", read("wrong"))
    world.lose("c")
    assert refusal_of(world, world.streams["b"]).reason == wire.DATA_DIFFERS


def test_who_has_gone_home_is_remembered() -> None:
    world = world_of("a", "b")
    says(world, "a", read("wrong"))
    says(world, "b", read("right"))
    assert refusal_of(world, world.streams["b"]).reason == wire.DATA_DIFFERS
    world.belong_together("c", key="key of c")
    world.greet("c")
    says(world, "c", read("right"))
    assert fingerprint(world) == "right"
    assert refusal_of(world, world.streams["a"]).reason == wire.DATA_DIFFERS


def test_several_machines_of_one_party_are_one_voice() -> None:
    world = world_of("a", "b")
    world.belong_together("c", "d", "e")
    for node in "cde":
        world.greet(node)
    says(world, "a", read("right"))
    for node in "cde":
        says(world, node, read("wrong"))
    says(world, "b", read("right"))
    assert fingerprint(world) == "right"
    assert {*world.state.members.sessions} == {"a", "b"}


def test_strangers_need_one_more_than_the_two_that_described_the_run() -> None:
    world = world_of("a", "b", "c", "d", "e", open=True)
    says(world, "a", read("wrong"))
    says(world, "b", read("wrong"))
    says(world, "c", read("right"))
    says(world, "d", read("right"))
    assert fingerprint(world) == "wrong"
    says(world, "e", read("right"))
    assert fingerprint(world) == "right"
    assert {*world.state.members.sessions} == {"c", "d", "e"}
    assert world.refolded() == world.state.ledger


def test_once_there_is_a_plan_the_data_stay_as_they_are() -> None:
    world = World(fresh_state(cluster={"nodes": 1, "stages": 1}))
    for node in "abc":
        world.belong_together(node, key=f"key of {node}")
    world.join("a")
    assert world.state.ledger.training.generation == 1
    world.greet("b")
    for node in "bc":
        world.greet(node)
        says(world, node, read("right"))
        assert refusal_of(world, world.streams[node]).reason == wire.DATA_DIFFERS
    assert world.events(ev.DescriptionDropped) == []


def test_a_plan_that_was_asked_for_before_the_data_changed_is_not_adopted() -> None:
    world = World(fresh_state(cluster={"nodes": 1, "stages": 1}))
    world.automatic_planning = False
    for node in "abc":
        world.belong_together(node, key=f"key of {node}")
    world.join("a")
    assert world.wanted
    for node in "bc":
        world.greet(node)
    for node in "bc":
        says(world, node, read("right"))
    assert fingerprint(world) == "right"
    world.automatic_planning = True
    world.report_links("c")
    world.wait(1.0, beating="bc")
    world.settle()
    world.step()
    assert "a" not in world.plan_in_force.nodes


def test_the_coordinators_own_copy_counts_more_than_any_member() -> None:
    world = world_of("a", "b", "c", "d")
    world.feed(t.OwnFilesRead((file("right"),)))
    for node in "abc":
        says(world, node, read("wrong"))
        refusal = refusal_of(world, world.streams[node])
        assert refusal.reason == wire.DATA_DIFFERS
        fix = "copy the coordinator's file here, or remove its copy and start it again"
        assert refusal.sentence == f"{DIFFERS}; {fix}"
    says(world, "d", read("right"))
    assert fingerprint(world) == "right"


def test_the_coordinators_own_copy_counts_also_when_it_has_read_it_late() -> None:
    world = world_of("a", "b", "c")
    says(world, "a", read("wrong"))
    says(world, "b", read("right"))
    world.feed(t.OwnFilesRead((file("right"),)))
    assert fingerprint(world) == "right"
    assert refusal_of(world, world.streams["a"]).reason == wire.DATA_DIFFERS
    says(world, "c", read("right"))
    assert {*world.state.members.sessions} == {"b", "c"}


def test_of_a_source_that_the_coordinator_has_a_part_of_only_that_part_is_compared() -> None:
    shards = [file("first", name="0.jsonl").message, file("second", name="1.jsonl").message]
    has_both = prepared(data_fingerprint=b"right".ljust(32), data_read=True, files=shards)
    for own, agrees in ((file("first", name="0.jsonl"), True), (file("another", name="0.jsonl"), False)):
        world = world_of("a")
        world.feed(t.OwnFilesRead((own,)))
        says(world, "a", has_both)
        assert (world.state.ledger.described is not None) == agrees


@pytest.mark.parametrize("own", [file("other", key="data.held_out"), file("right")])
def test_a_copy_of_something_else_or_the_same_changes_nothing(own: SourceFile) -> None:
    world = world_of("a", "b")
    says(world, "a", read("right"))
    world.feed(t.OwnFilesRead((own,)))
    says(world, "b", read("right"))
    assert {*world.state.members.sessions} == {"a", "b"}


def test_the_same_files_with_other_tokens_are_told_apart() -> None:
    world = world_of("a", "b")
    says(world, "a", read("right"))
    message = read("right")
    message.prepared.data_fingerprint = b"by another tokenizer".ljust(32)
    says(world, "b", message)
    assert "the files are the same, so that it is their tokens" in refusal_of(world, world.streams["b"]).sentence


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "x" * 129),
        ("name", "a\nb"),
        ("key", ""),
        ("digest", b"short"),
        ("ranges", b"short"),
        ("range_bytes", 1),
        ("size", 1 << 51),
    ],
)
def test_impossible_files_are_refused(field: str, value: object) -> None:
    world = world_of("a")
    message = read("right")
    setattr(message.prepared.files[0], field, value)
    says(world, "a", message)
    assert refusal_of(world, world.streams["a"]).reason == wire.MALFORMED


def test_so_are_more_files_than_a_node_describes() -> None:
    world = world_of("a")
    says(world, "a", prepared(files=513 * [SourceFile("data.source", "x", 1).message]))
    assert refusal_of(world, world.streams["a"]).reason == wire.MALFORMED
