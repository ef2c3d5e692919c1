"""Who may join, and what a node goes through until it is planned with."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dtfm.coordinator import events as ev
from dtfm.coordinator import membership
from dtfm.coordinator import turn as t
from dtfm.coordinator.state import MOST_PROBED, REMEMBERED_LEASES, TOGETHER_LEASES, Standing
from dtfm.protos import PROTOCOL_VERSION, plan_pb2
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import (
    LAYERS,
    LEASE,
    SIGNING_REQUEST,
    World,
    fresh_state,
    links,
    prepared,
    training,
    two_stages,
)

BIG = plan_pb2.Workload(
    layers=[plan_pb2.Workload.Layer(name="x", forward_flops=math.inf)] * LAYERS,
    micro_batches=4,
    optimizer_bytes_per_parameter_byte=2,
)


def refusal_of(world: World, stream: int) -> wire.Refusal:
    assert stream in world.hung_up
    return world.said[stream][-1].refusal


def test_a_node_is_welcomed_with_the_run_and_its_heartbeat() -> None:
    world = World()
    world.greet("a")
    welcome = world.last_to("a", "welcome")
    assert welcome.run == world.state.message
    assert welcome.heartbeat_seconds == LEASE / 4
    assert world.certified == [("a", SIGNING_REQUEST)]
    assert world.names() == ["node_joined"]


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        (
            {"protocol_version": PROTOCOL_VERSION + 1},
            wire.PROTOCOL_VERSION,
            f"version {PROTOCOL_VERSION + 1}, this coordinator {PROTOCOL_VERSION}; update dtfm on the coordinator",
        ),
        ({"protocol_version": 0}, wire.PROTOCOL_VERSION, "update dtfm on the node"),
        ({"run": "other"}, wire.WRONG_RUN, "asks for run 'other', this coordinator has 'demo'"),
        ({"node": ""}, wire.MALFORMED, "node is ''; it must be 1 to 64 letters"),
        ({"node": "a" * 65}, wire.MALFORMED, "1 to 64 letters"),
        ({"node": "a\n"}, wire.MALFORMED, "1 to 64 letters"),
        ({"address": "nowhere"}, wire.MALFORMED, "give HOST:PORT"),
        ({"address": "10.0.0.1:0"}, wire.MALFORMED, "--advertise HOST:PORT"),
        ({"address": "0.0.0.0:7000"}, wire.MALFORMED, "--advertise HOST:PORT"),
        ({"package_version": "1" * 65}, wire.MALFORMED, "at most 64 characters"),
        ({"device": wire.Device(kind="abacus", memory_bytes=1, flops=1)}, wire.MALFORMED, '"cpu" or "cuda"'),
        ({"device": wire.Device(kind="cpu", memory_bytes=0, flops=1)}, wire.MALFORMED, "above 0"),
        ({"device": wire.Device(kind="cpu", memory_bytes=1, flops=math.nan)}, wire.MALFORMED, "device.flops is nan"),
        ({"device": wire.Device(kind="cpu", memory_bytes=1, flops=-1)}, wire.MALFORMED, "device.flops is -1.0"),
        ({"signing_request": b"please"}, wire.MALFORMED, "signing_request: this is no signing request"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], reason: wire.RefusalReason, words: str
) -> None:
    world = World()
    refusal = refusal_of(world, world.greet("a", **changes))
    assert (refusal.reason, words in refusal.sentence) == (reason, True), refusal.sentence
    assert not world.state.sessions


def test_a_run_may_be_asked_for_by_name_or_id() -> None:
    world = World()
    world.greet("a", run="demo")
    world.greet("b", run="run-id")
    assert set(world.state.sessions) == {"a", "b"}


def test_without_the_token_nothing_is_told_and_nothing_is_logged() -> None:
    world = World()
    refusal = refusal_of(world, world.greet("a", shows_token=False))
    assert refusal.reason == wire.TOKEN
    assert world.log == []


def test_a_stream_that_does_not_begin_with_hello_is_refused() -> None:
    world = World()
    world.feed(t.Greeted(9, wire.NodeMessage(heartbeat=wire.Heartbeat()), True))
    assert refusal_of(world, 9).reason == wire.MALFORMED


def test_two_live_processes_cannot_have_one_identity() -> None:
    world = World()
    world.greet("a", incarnation=1)
    first = world.streams["a"]
    second = world.greet("a", incarnation=2)
    world.wait(LEASE / 4)
    world.feed(t.Heard(first, wire.NodeMessage(heartbeat=wire.Heartbeat())))
    world.feed(t.TimePassed())
    refusal = refusal_of(world, second)
    assert refusal.reason == wire.IDENTITY_IN_USE
    assert "--id" in refusal.sentence
    assert world.state.sessions["a"].stream == first
    assert not world.state.contenders


def test_a_restarted_node_takes_its_place_once_its_old_stream_breaks() -> None:
    world = World()
    old = world.greet("a", incarnation=1)
    new = world.greet("a", incarnation=2)
    assert new not in world.said
    world.feed(t.StreamClosed(old, "its connection broke"))
    assert world.said[new][-1].WhichOneof("message") == "welcome"
    assert world.state.sessions["a"].incarnation == 2
    assert [(e.event, e.reason) for e in world.log if isinstance(e, ev.NodeJoined | ev.NodeLeft)] == [
        ("node_joined", "first contact"),
        ("node_left", "its connection broke"),
        ("node_joined", "first contact"),
    ]


def test_a_restarted_node_takes_its_place_when_the_old_process_gives_no_sign_of_life() -> None:
    world = training("a", "b")
    world.feed(t.TimePassed())
    world.step()
    old = world.streams["a"]
    new = world.greet("a", incarnation=2)
    world.wait(LEASE * 0.4, beating=["b"])
    assert new not in world.said
    world.wait(LEASE * 0.2, beating=["b"])
    assert old in world.hung_up
    assert world.said[new][-1].WhichOneof("message") == "welcome"
    assert world.state.sessions["a"].incarnation == 2
    world.feed(t.StreamClosed(old, "late news of the old stream"))
    assert "a" in world.state.sessions


def test_of_two_that_claim_an_identity_the_second_is_refused_and_a_reconnect_is_none() -> None:
    world = World()
    world.feed(t.TimePassed())
    world.greet("a", incarnation=1)
    first = world.greet("a", incarnation=2)
    again = world.greet("a", incarnation=2)
    assert first in world.hung_up
    assert refusal_of(world, world.greet("a", incarnation=3)).reason == wire.IDENTITY_IN_USE
    world.wait(LEASE * 0.6)
    assert world.said[again][-1].WhichOneof("message") == "welcome"


def test_who_claims_an_identity_and_goes_away_never_becomes_a_member() -> None:
    world = World()
    old = world.greet("a", incarnation=1)
    new = world.greet("a", incarnation=2)
    world.feed(t.StreamClosed(new, "its connection broke"))
    world.feed(t.StreamClosed(old, "its connection broke"))
    assert not world.state.sessions
    assert not world.state.ledger.members


def test_the_same_process_replaces_its_old_stream() -> None:
    world = World()
    old = world.greet("a", incarnation=1)
    new = world.greet("a", incarnation=1)
    assert old in world.hung_up
    assert world.state.sessions["a"].stream == new
    assert [name for name in world.names() if name.startswith("node")] == ["node_joined", "node_left", "node_joined"]
    world.feed(t.StreamClosed(old, "late news of the old stream"))
    assert "a" in world.state.sessions


def test_a_finished_run_takes_nobody() -> None:
    world = training()
    world.finish_run()
    refusal = refusal_of(world, world.greet("c"))
    assert refusal.reason == wire.RUN_OVER


def test_the_first_prepared_defines_the_run_and_needs_no_probe() -> None:
    world = World()
    world.greet("a")
    world.hear("a", prepared())
    assert world.state.ledger.described is not None
    assert world.state.ledger.described.workload.micro_batches == 4
    assert world.state.sessions["a"].standing is Standing.ARRIVED
    assert world.kinds_to("a") == ["welcome"]


def test_a_node_counts_for_as_fast_as_it_computes_this_runs_layers() -> None:
    world = World()
    world.greet("a")
    world.hear("a", prepared(flops=3e9))
    assert world.events(ev.DeviceTimed) == [ev.DeviceTimed("a", 3e9)]
    assert world.state.ledger.members["a"].device.flops == 3e9
    again = wire.Device(kind="cpu", name="a cpu", memory_bytes=1 << 33, flops=3e9)
    world.greet("a", device=again)
    world.hear("a", prepared(flops=3e9))
    assert len(world.events(ev.DeviceTimed)) == 1


@pytest.mark.parametrize("flops", [math.nan, -1.0, 1e30])
def test_a_speed_that_no_device_has_is_no_speed(flops: float) -> None:
    world = World()
    stream = world.greet("a")
    world.hear("a", prepared(flops=flops))
    assert "device.flops is" in refusal_of(world, stream).sentence


def test_later_nodes_probe_all_that_prepared_before() -> None:
    world = World(fresh_state(cluster={"nodes": 4}))
    world.join("a", "b")
    world.greet("slow")
    world.greet("c")
    world.hear("c", prepared())
    probe = world.last_to("c", "probe")
    assert [peer.node for peer in probe.peers] == ["a", "b"]
    assert "c" not in world.state.ready
    world.hear("c", links("c", ["a", "b"]))
    world.wait(LEASE / 4)
    assert "c" in world.state.ready
    assert "c" in world.state.ledger.links["a"]


def test_a_node_that_does_not_report_its_links_is_planned_with_all_the_same() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a")
    world.greet("b")
    world.hear("b", prepared())
    world.wait(7 * LEASE, beating=["a", "b"])
    assert world.state.sessions["b"].standing is Standing.READY


def test_a_newcomer_among_many_probes_some_of_them() -> None:
    world = World(fresh_state(cluster={"nodes": 1000}))
    names = [f"n{number:03d}" for number in range(3 * MOST_PROBED)]
    probed: set[str] = set()
    for node in names:
        world.greet(node)
        world.hear(node, prepared())
        peers = [peer.node for message in world.heard_by(node) for peer in message.probe.peers]
        assert len(peers) == len(set(peers)) <= MOST_PROBED
        probed.update(peers)
    assert len(probed) > 2 * MOST_PROBED


def test_a_peer_that_hangs_does_not_keep_a_newcomer_waiting() -> None:
    world = World(fresh_state(cluster={"nodes": 4}))
    world.join("a", "hung")
    world.wait(LEASE * 0.6, beating=["a"])
    world.greet("b")
    world.hear("b", prepared())
    probes = [[peer.node for peer in message.probe.peers] for message in world.heard_by("b")[1:]]
    assert probes == [["a"], ["hung"]]
    world.hear("b", links("b", ["a"]))
    world.wait(LEASE / 4, beating=["a", "b"])
    assert "b" in world.state.ready


def test_newcomers_of_the_same_moment_are_ready_together() -> None:
    world = World(fresh_state(cluster={"nodes": 9}))
    for node in ("a", "b", "c"):
        world.greet(node)
        world.hear(node, prepared())
        world.hear(node, links(node, []))
        world.now += LEASE * TOGETHER_LEASES / 2
        world.feed(t.TimePassed())
        assert world.state.ready == ()
    world.now += LEASE * TOGETHER_LEASES / 2
    world.feed(t.TimePassed())
    assert world.state.ready == ("a", "b", "c")


def test_the_nodes_that_a_run_awaits_do_not_wait_for_others() -> None:
    world = World()
    world.greet("a")
    world.hear("a", prepared())
    world.greet("b")
    world.hear("b", prepared())
    world.hear("b", links("b", ["a"]))
    assert world.names()[-1] == "plan_adopted"


def test_forty_that_join_at_once_end_in_one_plan() -> None:
    world = training("a", "b")
    newcomers = [f"n{number:02d}" for number in range(40)]
    for node in newcomers:
        world.greet(node)
        world.hear(node, prepared())
        world.hear(node, links(node, ["a", "b"]))
        world.now += 1 / len(newcomers)
        world.feed(t.TimePassed())
    world.wait(LEASE / 4, beating=["a", "b", *newcomers])
    world.step()
    world.apply()
    assert [set(adopted.plan.nodes) for adopted in world.events(ev.PlanAdopted)] == [
        {"a", "b"},
        {"a", "b", *newcomers},
    ]


def test_a_stream_of_newcomers_is_let_in_at_least_once_a_lease() -> None:
    world = World(fresh_state(cluster={"nodes": 1000}))
    for number in range(30):
        node = f"n{number}"
        world.greet(node)
        world.hear(node, prepared())
        world.hear(node, links(node, []))
        world.wait(LEASE * TOGETHER_LEASES * 0.9, beating=list(world.state.sessions))
    assert 20 <= len(world.state.ready) < 30


def test_a_link_that_broke_is_measured_again_ever_more_rarely_and_planned_with_once_it_is_well() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.planner = lambda ids: two_stages(["a", "b"])
    world.join("a", "b")
    world.greet("c")
    world.hear("c", prepared())
    report = links("c", ["a", "b"])
    for link in report.links.links:
        if "b" in (link.source, link.destination):
            link.bandwidth, link.problem = 0, "no route"
    world.hear("c", report)
    world.settle()
    assert world.state.ledger.broken == {("b", "c")}
    probed = []
    for _ in range(95):
        before = len(world.heard_by("b"))
        world.wait(LEASE, beating=["a", "b", "c"])
        probed.append(sum(m.WhichOneof("message") == "probe" for m in world.heard_by("b")[before:]))
    assert [seconds for seconds, count in enumerate(probed, 1) if count] == [7, 19, 43, 91]
    asked = world.state.asked
    world.hear("b", links("b", ["c"]))
    assert world.state.ledger.broken == frozenset()
    assert world.state.asked == asked + 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data_fingerprint": b"otherwise"}, wire.DATA_DIFFERS),
        ({"training_samples": 99}, wire.DATA_DIFFERS),
        ({"buckets": 5}, wire.WORKLOAD_DIFFERS),
        ({"micro_batches": 5}, wire.MALFORMED),
        ({"workload": BIG}, wire.MALFORMED),
        ({"buckets": 3}, wire.MALFORMED),
        ({"training_samples": 0}, wire.MALFORMED),
        ({"data_fingerprint": b"short"}, wire.MALFORMED),
        ({"unigram_entropy": math.nan}, wire.MALFORMED),
        ({"tokens_per_sample": 0}, wire.MALFORMED),
    ],
)
def test_a_node_that_would_train_something_else_is_refused(changes: dict[str, Any], reason: wire.RefusalReason) -> None:
    world = World()
    world.join("a")
    stream = world.greet("b")
    world.hear("b", prepared(**changes))
    assert refusal_of(world, stream).reason == reason
    assert set(world.state.sessions) == {"a"}
    assert world.names()[-2:] == ["node_refused", "node_left"]


def test_impossible_links_are_refused_and_hurt_nobody_else() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a", "b")
    report = links("b", ["a"])
    report.links.links[0].bandwidth = math.inf
    stream = world.streams["b"]
    world.hear("b", report)
    assert refusal_of(world, stream).reason == wire.MALFORMED
    assert set(world.state.sessions) == {"a"}


def test_links_of_others_cannot_be_reported() -> None:
    world = World(fresh_state(cluster={"nodes": 4}))
    world.join("a", "b", "c")
    world.hear("c", links("a", ["b"]))
    assert "c" not in world.state.sessions


def test_a_lease_lapses_without_signs_of_life() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a", "b")
    world.wait(LEASE * 1.5, beating=["a"])
    assert set(world.state.sessions) == {"a"}
    assert world.events(ev.NodeLeft)[-1].reason == "no sign of life for 10 seconds"


def test_a_coordinator_that_was_suspended_does_not_blame_its_nodes() -> None:
    world = World(fresh_state(cluster={"nodes": 3}))
    world.join("a", "b")
    world.wait(LEASE, beating=["a", "b"])
    world.now += 5 * LEASE
    world.feed(t.TimePassed())
    assert set(world.state.sessions) == {"a", "b"}
    world.wait(LEASE * 1.2, beating=["a"])
    assert set(world.state.sessions) == {"a"}


def test_messages_of_a_node_that_is_not_ready_are_ignored() -> None:
    world = training("a", "b")
    world.greet("c")
    before = world.state.ledger
    world.hear("c", step_ready=wire.StepReady(generation=1, step=1, state_digest=b"x" * 16))
    world.hear("c", bucket_written=wire.BucketWritten(step=1))
    assert world.state.ledger == before


def test_who_comes_back_to_where_it_was_need_not_measure_its_links_again() -> None:
    world = training("a", "b", "c")
    world.lose("c")
    world.greet("c", incarnation=2)
    world.hear("c", prepared())
    assert "probe" not in world.kinds_to("c")
    assert world.state.ledger.links["a"]["c"].bandwidth == world.state.ledger.links["c"]["a"].bandwidth == 1e9


def test_elsewhere_or_much_later_it_measures_them() -> None:
    world = training("a", "b", "c")
    world.lose("c")
    world.greet("c", incarnation=2, address="10.0.0.2:7000")
    world.hear("c", prepared())
    assert [peer.node for peer in world.last_to("c", "probe").peers] == ["a", "b"]
    world.lose("c")
    world.wait(REMEMBERED_LEASES * LEASE + 1, beating=["a", "b"])
    world.greet("c", incarnation=3, address="10.0.0.2:7000")
    world.hear("c", prepared())
    assert "probe" in world.kinds_to("c")


def test_only_links_to_who_is_new_are_measured_when_a_node_comes_back() -> None:
    world = training("a", "b", "c")
    world.lose("c")
    world.join("d")
    world.greet("c", incarnation=2)
    world.hear("c", prepared())
    assert [peer.node for peer in world.last_to("c", "probe").peers] == ["d"]


def test_links_of_all_that_left_are_remembered_while_there_is_room_then_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "MAX_NODES", 4)
    world = training("a", "b")
    for node in "cdefg":
        world.join(node)
        world.lose(node)
        assert len(world.state.remembered) == min(4, 1 + "cdefg".index(node))
    assert list(world.state.remembered) == ["d", "e", "f", "g"]
