"""Who says what the model and the data are: `core/members/membership.py`, `[trust]` in the run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.service.startup import open_run
from dtfm.coordinator.store.store import Store
from dtfm.protos import control_pb2 as wire
from dtfm.protos.run_file.run_file import parse_run
from tests.coordinator.doors import Door
from tests.coordinator.every_event import DESCRIBED
from tests.coordinator.script import World, fresh_state, prepared, refusal_of, run_table, training
from tests.coordinator.stores import store_url

OTHER = prepared(data_fingerprint=b"other data", data_read=True)
SAME = prepared(data_read=True)


def described() -> ev.Described:
    """What nodes say that prepare as `prepared` does."""
    return training().events(ev.RunDescribed)[0].described


def with_keys(*nodes: str, **trust: str) -> World:
    """Each of the nodes has a key of its own; ``trust`` is the run file's table."""
    world = World(fresh_state(cluster={"nodes": 2}, trust=trust))
    for node in nodes:
        world.belong_together(node, key=f"key of {node}")
    return world


def test_in_open_mode_the_first_one_is_not_believed() -> None:
    world = with_keys("a", "b", "liar", mode="open")
    world.prepare("liar", OTHER)
    world.prepare("a", SAME)
    world.feed(t.TimePassed())
    assert world.events(ev.RunDescribed) == []
    assert "two members with different keys have to say what the run is" in world.events(ev.Waiting)[-1].reason
    world.prepare("b", SAME)
    assert world.events(ev.RunDescribed)[0].described == described()
    assert world.state.ledger.data_confirmed
    assert refusal_of(world, world.streams["liar"]).reason == wire.DATA_DIFFERS
    world.report_links("b")
    world.wait(1.0, beating="ab")
    world.settle()
    world.step()
    assert world.refolded() == world.state.ledger


def test_in_open_mode_two_names_of_one_key_are_one_word() -> None:
    world = with_keys("a", mode="open")
    world.belong_together("liar", "liar-2")
    for node in ("liar", "liar-2"):
        world.prepare(node, OTHER)
    assert world.events(ev.RunDescribed) == []


def test_whoever_leaves_has_said_nothing() -> None:
    world = with_keys("a", "b", mode="open")
    world.prepare("a", SAME)
    world.lose("a")
    world.prepare("b", SAME)
    assert world.events(ev.RunDescribed) == []


@pytest.mark.parametrize("mode", ["trusted", "open"])
def test_what_the_run_file_pins_is_believed_at_once_and_nothing_else(mode: str) -> None:
    pins = {"data": described().data_digest, "workload": described().workload_digest}
    world = with_keys("a", "liar", mode=mode, **pins)
    refusal = refusal_of(world, world.prepare("liar", OTHER))
    assert refusal.reason == wire.DATA_DIFFERS
    assert f"the run file pins trust.data = {pins['data']}" in refusal.sentence
    refusal = refusal_of(world, world.prepare("liar", prepared(buckets=5)))
    assert refusal.reason == wire.WORKLOAD_DIFFERS
    world.prepare("a", SAME)
    assert world.events(ev.RunDescribed)[0].described == described()


def test_the_digests_cover_all_that_members_must_agree_on_and_not_what_may_differ() -> None:
    base = described()
    assert prepared_digests() == (base.data_digest, base.workload_digest)
    for field in ("training_samples", "evaluation_samples", "tokens_per_sample"):
        data, workload = prepared_digests(**{field: 77})
        assert (data != base.data_digest, workload) == (True, base.workload_digest)
    assert prepared_digests(unigram_entropy=1.5) == prepared_digests()
    assert prepared_digests(weights_fingerprint=bytes(8))[1] != base.workload_digest


def prepared_digests(**changes: Any) -> tuple[str, str]:
    world = World()
    world.prepare("a", prepared(**changes))
    said = world.events(ev.RunDescribed)[0].described
    return said.data_digest, said.workload_digest


def test_a_run_goes_on_with_new_pins_if_they_match_its_training(tmp_path: Path) -> None:
    run = parse_run(run_table(checkpoint={"uri": tmp_path.as_uri()}), "the test")
    pins = {"data": DESCRIBED.data_digest, "workload": DESCRIBED.workload_digest}
    right, wrong = (
        run_table(checkpoint={"uri": tmp_path.as_uri()}, trust=trust) for trust in (pins, {"data": "0" * 64})
    )
    with Store(store_url(tmp_path), write=True) as store:
        *_, events = open_run(store, run)
        store.append([*events, ev.RunDescribed(DESCRIBED, "a")])
        open_run(store, parse_run(right, "the test"))
        with pytest.raises(ValueError, match=r"trust.data pins 0000.*as a said"):
            open_run(store, parse_run(wrong, "the test"))


def test_a_single_node_that_describes_the_run_cannot_make_it_hopeless() -> None:
    world = with_keys("a", "b")
    world.automatic_planning = False
    world.join("a", "b")
    world.feed(t.Planned(world.wanted[-1].number, "stages is 9; the model has 4 layers", hopeless=True))
    assert world.exit_code is None
    assert isinstance(world.state.phase, Gathering)
    assert "stages is 9" in world.events(ev.Waiting)[-1].reason


def test_the_description_by_a_node_expelled_before_any_plan_no_longer_counts() -> None:
    world = World(fresh_state(cluster={"nodes": 2}))
    Door(world)
    world.prepare("liar", OTHER)
    world.prepare("a", SAME)
    assert refusal_of(world, world.streams["a"]).reason == wire.DATA_DIFFERS
    world.feed(t.Asked(1, wire.ExpelRequest(node="liar", reason="it lies about the data"), "operator", 0.0))
    assert world.events(ev.DescriptionDropped) == [ev.DescriptionDropped("liar")]
    world.join("a", "b", incarnation=2)
    world.settle()
    world.step()
    assert world.state.ledger.described == described()
    assert world.refolded() == world.state.ledger


def test_it_counts_if_somebody_else_has_said_the_same() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    Door(world)
    world.prepare("a", SAME)
    world.prepare("b", SAME)
    world.feed(t.Asked(1, wire.ExpelRequest(node="a", reason="it is slow"), "operator", 0.0))
    assert world.state.ledger.described == described()
    world.report_links("b")
    world.join("c", "d")
    world.settle()
    world.step()
    assert world.state.ledger.training.step == 1


def frozen(backward_flops: float = 1e9) -> wire.NodeMessage:
    """What nodes say of a run with an adapter."""
    message = prepared()
    for layer in message.prepared.layers:
        layer.frozen_bytes, layer.backward_flops = 1 << 30, backward_flops
    return message


def test_frozen_weights_count_with_their_bytes_and_a_cheaper_backward_pass() -> None:
    world = World(fresh_state())
    world.prepare("a", frozen())
    found = world.events(ev.RunDescribed)[0].described
    assert {layer.frozen_bytes for layer in found.workload.layers} == {1 << 30}
    assert found.workload.backward_per_forward == 1
    assert found.workload_digest != described().workload_digest
    assert "beside 4096.0 MiB that stay as they are" in world.events(ev.RunDescribed)[0].narrate()
    refusal = refusal_of(world, world.prepare("b", SAME))
    assert refusal.reason == wire.WORKLOAD_DIFFERS


def test_no_backward_pass_costs_more_than_twice_the_forward_pass() -> None:
    world = World(fresh_state())
    refusal = refusal_of(world, world.prepare("a", frozen(backward_flops=3e9)))
    assert refusal.sentence.startswith("backward_flops is 3.0")
