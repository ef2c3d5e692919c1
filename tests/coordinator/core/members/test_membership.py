"""Who becomes a member, under which identity and for how long: `core/members/membership.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Switching
from dtfm.coordinator.log import events as ev
from dtfm.protos import PROTOCOL_VERSION, control_pb2 as wire, plan_pb2
from dtfm.scheduler.model.memory import KEPT_PER_OUTPUT_BYTE, OptimizerState
from tests.coordinator.script import LAYERS, LEASE, World, fresh_state, prepared, refusal_of, training

BIG = [plan_pb2.Layer(name="x", forward_flops=math.inf)] * LAYERS


def measured(kept_bytes: int = 4 << 20, working_bytes: int = 1 << 10) -> list[plan_pb2.Layer]:
    """The layers that all nodes prepare, with the bytes that each keeps."""
    layers = list(prepared().prepared.layers)
    for layer in layers:
        layer.kept_bytes, layer.working_bytes = kept_bytes, working_bytes
    return layers


def test_a_node_is_welcomed_with_the_run_and_its_heartbeat() -> None:
    world = World()
    world.greet("a")
    welcome = world.last_to("a", "welcome")
    assert welcome.run == world.state.message
    assert (welcome.status.lease_seconds, welcome.status.heartbeat_seconds) == (LEASE, LEASE / 4)
    assert world.certified == ["a"]
    assert world.names() == ["node_joined", "waiting"]


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        (
            {"protocol_version": PROTOCOL_VERSION + 1},
            wire.PROTOCOL_VERSION,
            f"version {PROTOCOL_VERSION + 1}, this coordinator {PROTOCOL_VERSION}; update dtfm on the coordinator",
        ),
        ({"protocol_version": 0}, wire.PROTOCOL_VERSION, "update dtfm on the node"),
        ({"node": ""}, wire.MALFORMED, "node is ''; it must be 1 to 64 letters"),
        ({"node": "a" * 65}, wire.MALFORMED, "1 to 64 letters"),
        ({"node": "a\n"}, wire.MALFORMED, "1 to 64 letters"),
        ({"candidates": ["nowhere"]}, wire.MALFORMED, "give HOST:PORT"),
        ({"candidates": ["10.0.0.1:0"]}, wire.MALFORMED, "--advertise IP:PORT"),
        ({"candidates": ["0.0.0.0:7000"]}, wire.MALFORMED, "--advertise IP:PORT"),
        ({"package_version": "1" * 65}, wire.MALFORMED, "at most 64 characters"),
        ({"device": wire.Device(kind="abacus", memory_bytes=1, flops=1)}, wire.MALFORMED, '"cpu" or "cuda"'),
        ({"device": wire.Device(kind="cpu", memory_bytes=0, flops=1)}, wire.MALFORMED, "above 0"),
        (
            {"device": wire.Device(kind="cuda", memory_bytes=1, flops=1, host_memory_bytes=1 << 50)},
            wire.MALFORMED,
            "host_memory_bytes is 1125899906842624; it must be below 2**50",
        ),
        ({"device": wire.Device(kind="cpu", memory_bytes=1, flops=math.nan)}, wire.MALFORMED, "device.flops is nan"),
        ({"device": wire.Device(kind="cpu", memory_bytes=1, flops=-1)}, wire.MALFORMED, "device.flops is -1.0"),
    ],
)
def test_a_wrong_hello_is_refused_with_its_reason(
    changes: dict[str, Any], reason: wire.RefusalReason, words: str
) -> None:
    world = World()
    refusal = refusal_of(world, world.greet("a", **changes))
    assert (refusal.reason, words in refusal.sentence) == (reason, True), refusal.sentence
    assert not world.state.members.sessions


def test_a_name_needs_its_own_key_and_a_false_claim_is_not_logged() -> None:
    world = World()
    refusal = refusal_of(world, world.greet("a", caller="b"))
    assert refusal.reason == wire.NAME_TAKEN
    assert "the key belongs to the name 'b'" in refusal.sentence
    assert world.log == []


def test_a_lease_that_ends_while_another_process_claims_the_identity_hands_it_over() -> None:
    world = training("a", "b")
    world.wait(0.25 * LEASE, beating="ab")
    world.wait(0.7 * LEASE, beating="b")
    world.greet("a", incarnation=2)
    world.wait(0.4 * LEASE, beating="b")  # the contest would be decided after half a lease
    assert world.state.ledger.members["a"].incarnation == f"{2:016x}"


def test_a_stranger_that_claims_a_members_name_cannot_fill_the_log() -> None:
    world = training("a", "b")
    streams, entries = dict(world.streams), len(world.log)
    wrong: tuple[dict[str, Any], ...] = ({"caller": "b"}, {"candidates": ["nowhere"]}, {"protocol_version": 9})
    refused = [world.greet("a", **changes) for changes in wrong]
    reasons = [refusal_of(world, stream).reason for stream in refused]
    assert reasons == [wire.NAME_TAKEN, wire.MALFORMED, wire.PROTOCOL_VERSION]
    assert len(world.log) == entries
    world.streams.update(streams)
    world.step()


def test_a_stream_that_does_not_begin_with_hello_is_refused() -> None:
    world = World()
    world.feed(t.Greeted(9, wire.NodeMessage(heartbeat=wire.Heartbeat()), "a"))
    assert refusal_of(world, 9).reason == wire.MALFORMED


def test_two_live_processes_cannot_share_an_identity() -> None:
    world = training("a", "b")
    old = world.streams["a"]
    world.wait(LEASE * 0.4, beating=["b"])
    refusal = refusal_of(world, world.greet("a", incarnation=2))
    assert refusal.reason == wire.IDENTITY_IN_USE
    assert "--id" in refusal.sentence
    assert refusal.sentence.endswith("start this one again in 5 s")
    assert world.state.members.sessions["a"].stream == old


def test_a_restarted_node_takes_its_place_when_the_old_process_gives_no_sign_of_life() -> None:
    world = training("a", "b")
    world.feed(t.TimePassed())
    world.step()
    old = world.streams["a"]
    world.wait(LEASE * 0.6, beating=["b"])
    new = world.greet("a", incarnation=2)
    assert old in world.hung_up
    assert "welcome" in [message.WhichOneof("message") for message in world.said[new]]
    assert world.state.ledger.members["a"].incarnation == f"{2:016x}"
    world.feed(t.StreamClosed(old, "late news of the old stream"))
    assert "a" in world.state.members.sessions


def test_the_same_process_replaces_its_old_stream() -> None:
    world = World()
    old = world.greet("a", incarnation=1)
    new = world.greet("a", incarnation=1)
    assert old in world.hung_up
    assert world.state.members.sessions["a"].stream == new
    assert [name for name in world.names() if name.startswith("node")] == ["node_joined", "node_left", "node_joined"]
    world.feed(t.StreamClosed(old, "late news of the old stream"))
    assert "a" in world.state.members.sessions


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data_fingerprint": b"otherwise"}, wire.DATA_DIFFERS),
        ({"training_samples": 99}, wire.DATA_DIFFERS),
        ({"weights_fingerprint": b"otherwise"}, wire.WORKLOAD_DIFFERS),
        ({"weights_fingerprint": b"short"}, wire.MALFORMED),
        ({"buckets": 5}, wire.WORKLOAD_DIFFERS),
        ({"layers": BIG}, wire.MALFORMED),
        ({"layers": [plan_pb2.Layer(name="x", parameter_bytes=1 << 20)] * LAYERS}, wire.MALFORMED),
        ({"layers": measured(kept_bytes=(8 << 20) + 1)}, wire.WORKLOAD_DIFFERS),
        ({"layers": measured(kept_bytes=(2 << 20) - 1)}, wire.WORKLOAD_DIFFERS),
        ({"layers": measured(working_bytes=(2 << 20) + 1)}, wire.WORKLOAD_DIFFERS),
        ({"layers": measured(kept_bytes=1 << 51)}, wire.MALFORMED),
        ({"buckets": 3}, wire.MALFORMED),
        ({"training_samples": 0}, wire.MALFORMED),
        ({"data_fingerprint": b"short"}, wire.MALFORMED),
        ({"unigram_entropy": math.nan}, wire.MALFORMED),
        ({"tokens_per_sample": 0}, wire.MALFORMED),
    ],
)
def test_a_node_that_would_train_something_else_is_refused(changes: dict[str, Any], reason: wire.RefusalReason) -> None:
    world = World()
    world.greet("a")
    world.prepare("a", prepared(layers=measured()))
    stream = world.prepare("b", prepared(**{"layers": measured(), **changes}))
    assert refusal_of(world, stream).reason == reason
    assert set(world.state.members.sessions) == {"a"}
    assert world.names()[-2:] == ["node_refused", "node_left"]


def test_layers_that_keep_nothing_count_as_such() -> None:
    world = World()
    world.join("a")
    assert world.state.ledger.described is not None
    assert {layer.kept for layer in world.state.ledger.described.workload.layers} == {0.0}


def test_what_layers_keep_and_work_with_may_differ_between_nodes() -> None:
    """By a factor of two, and below a mebibyte by any."""
    world = World()
    world.greet("a")
    world.prepare("a", prepared(layers=measured()))
    for node, kept, working in (("b", 2 << 20, 1 << 20), ("c", 8 << 20, 0)):
        world.prepare(node, prepared(layers=measured(kept_bytes=kept, working_bytes=working)))
    assert set(world.state.members.sessions) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("second", "differs"),
    [
        (b"d" * 32 + b"v" * 32, ""),
        (b"D" * 32 + b"v" * 32, "their config.json, or the names, types and shapes of their tensors, differ"),
        (b"d" * 32 + b"V" * 32, "their values differ: those of another revision, or of another training"),
        (b"", "their config.json"),
    ],
)
def test_all_nodes_begin_with_the_same_pretrained_weights(second: bytes, differs: str) -> None:
    world = World()
    world.greet("a")
    world.prepare("a", prepared(weights_fingerprint=b"d" * 32 + b"v" * 32))
    stream = world.prepare("b", prepared(weights_fingerprint=second))
    assert ("b" in world.state.members.sessions) == (not differs)
    if differs:
        assert differs in refusal_of(world, stream).sentence


def test_a_node_that_could_only_guess_what_layers_keep_is_welcome_whoever_comes_first() -> None:
    guessed = measured(working_bytes=0)
    for layer in guessed:
        layer.kept_bytes = int(KEPT_PER_OUTPUT_BYTE * layer.activation_bytes)
    apart = measured(kept_bytes=guessed[0].kept_bytes * 4, working_bytes=8 << 20)
    for first, second in ((guessed, apart), (apart, guessed)):
        world = World()
        for node, layers in (("a", first), ("b", second)):
            world.greet(node)
            world.prepare(node, prepared(layers=layers))
        assert set(world.state.members.sessions) == {"a", "b"}
        assert world.state.ledger.described is not None
        assert world.state.ledger.described.workload.layers[0].kept_bytes == first[0].kept_bytes


def test_the_run_says_how_nodes_may_keep_what_they_need() -> None:
    world = World(fresh_state(train={"optimizer_state": "host", "precision": "bf16"}))
    world.greet("a")
    world.prepare("a", prepared(layers=measured()))
    assert world.state.ledger.described is not None
    described = world.state.ledger.described.workload
    assert (described.checkpointing, described.optimizer_state) == (None, OptimizerState.HOST)
    assert (described.layers[0].kept_bytes, described.layers[0].working_bytes) == (4 << 20, 1 << 10)
    assert (described.micro_batches, described.copy_bytes_per_parameter_byte) == (4, 0.5)


def test_a_coordinator_that_was_suspended_does_not_blame_its_nodes() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a", "b")
    world.wait(LEASE, beating=["a", "b"])
    world.now += 5 * LEASE
    world.feed(t.TimePassed())
    assert set(world.state.members.sessions) == {"a", "b"}
    world.wait(LEASE * 1.2, beating=["a"])
    assert set(world.state.members.sessions) == {"a"}


def test_messages_of_a_node_that_is_not_ready_are_ignored() -> None:
    world = training("a", "b")
    world.greet("c")
    before = world.state.ledger
    world.hear("c", step_ready=wire.StepReady(generation=1, step=1, state_digest=b"x" * 32))
    world.hear("c", moved=wire.Moved(step=1))
    assert world.state.ledger == before


@pytest.mark.parametrize("how", ["stream", "goodbye", "lease"])
def test_a_membership_ends_with_the_stream_with_a_goodbye_or_with_the_lease(how: str) -> None:
    world = training("a", "b", "c")
    if how == "stream":
        world.lose("a")
    elif how == "goodbye":
        world.hear("a", goodbye=wire.Goodbye(reason="SIGTERM"))
    else:
        world.wait(LEASE * 1.5, beating=["b", "c"])
    assert set(world.state.members.sessions) == {"b", "c"}
    assert isinstance(world.state.phase, Switching)
    assert len(world.events(ev.NodeLeft)) == 1
