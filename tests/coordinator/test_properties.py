"""Whatever happens, in whatever order: the log stays true."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dtfm.coordinator import events as ev
from dtfm.coordinator import turn as t
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import DIGEST, LEASE, World, fresh_state, links, prepared

NODES = st.sampled_from(["a", "b", "c", "d"])
NUMBERS = st.integers(0, 6)
FLOATS = st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf, -1.0])

MESSAGES = st.one_of(
    st.builds(lambda g: wire.NodeMessage(plan_ready=wire.PlanReady(generation=g)), NUMBERS),
    st.builds(lambda g: wire.NodeMessage(plan_failed=wire.PlanFailed(generation=g, problem="x")), NUMBERS),
    st.builds(
        lambda g, s, x, n: wire.NodeMessage(
            step_ready=wire.StepReady(
                generation=g, step=s, squared_gradient_norm=2.0, loss_sum=x, samples=n, state_digest=DIGEST
            )
        ),
        NUMBERS,
        NUMBERS,
        FLOATS,
        st.sampled_from([0, 8]),
    ),
    st.builds(
        lambda g, s, p: wire.NodeMessage(step_failed=wire.StepFailed(generation=g, step=s, problem=p, peer="b")),
        NUMBERS,
        NUMBERS,
        st.integers(0, 4),
    ),
    st.builds(
        lambda g, s, x: wire.NodeMessage(evaluated=wire.Evaluated(generation=g, step=s, loss_sum=x, samples=8)),
        NUMBERS,
        NUMBERS,
        FLOATS,
    ),
    st.builds(
        lambda s, b: wire.NodeMessage(
            bucket_written=wire.BucketWritten(
                step=s, bucket=b, file="bucket-00001.safetensors", size_bytes=1, digest=DIGEST
            )
        ),
        NUMBERS,
        NUMBERS,
    ),
    st.builds(
        lambda g, s: wire.NodeMessage(applied=wire.Applied(generation=g, step=s, state_digest=DIGEST)), NUMBERS, NUMBERS
    ),
    st.just(wire.NodeMessage(goodbye=wire.Goodbye(reason="x"))),
    st.just(wire.NodeMessage()),
    st.just(prepared()),
    st.just(links("a", ["b", "c"])),
)

MOVES = st.one_of(
    st.tuples(st.just("join"), NODES),
    st.tuples(st.just("lose"), NODES),
    st.tuples(st.just("hear"), NODES, MESSAGES),
    st.tuples(st.just("fail"), NODES, st.integers(1, 4)),
    st.tuples(st.sampled_from(["settle", "step", "step", "evaluate", "save", "apply", "plan_now"])),
    st.tuples(st.just("wait"), st.sampled_from([1.0, LEASE * 1.1, LEASE * 120])),
)


def play(world: World, move: tuple[Any, ...]) -> None:
    """Does what the move says, as far as it can be done."""
    name, *rest = move
    present = [node for node in rest[:1] if node in world.streams] if name in ("lose", "hear", "fail") else [""]
    if name == "join":
        world.join(rest[0])
    elif name == "wait":
        world.wait(rest[0], beating=[s.node for s in world.state.sessions.values()][:2])
    elif name == "plan_now":
        world.feed(t.PlanNow(1))
    elif not present:
        return
    elif name == "lose":
        world.lose(rest[0])
    elif name == "hear":
        world.hear(rest[0], rest[1])
    elif name == "fail":
        world.fail_step(rest[0], rest[1], peer="b")
    elif world.state.ledger.plan is not None and all(n in world.streams for n in world.plan_in_force.nodes):
        if name == "save":
            world.write_buckets()
            if world.manifests:
                world.feed(t.ManifestDone(world.manifests.pop().step, ""))
        else:
            getattr(world, name)()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(MOVES, max_size=40),
    st.integers(1, 3),
    st.sampled_from(["auto", 1, 2]),
)
def test_no_step_is_skipped_or_committed_twice_and_the_log_is_the_state(
    moves: list[tuple[Any, ...]], nodes: int, stages: Any
) -> None:
    least = 1 if stages == "auto" else stages
    world = World(fresh_state(cluster={"nodes": max(nodes, least), "stages": stages}, train={"steps": 5}))
    for node in ["a", "b", "c"][:nodes]:
        world.join(node)
    for move in moves:
        play(world, move)
        assert world.refolded() == world.state.ledger

    step, generation, over = 0, 0, False
    for event in world.log:
        assert not (over and isinstance(event, ev.StepCommitted | ev.PlanAdopted | ev.RunFinished | ev.RunFailed))
        match event:
            case ev.StepCommitted():
                assert (event.step, event.generation) == (step + 1, generation)
                assert event.samples == 8
                assert math.isfinite(event.loss)
                step = event.step
            case ev.RolledBack():
                assert (event.from_step, event.step <= step) == (step, True)
                step = event.step
            case ev.PlanAdopted():
                assert (event.generation, event.step) == (generation + 1, step)
                generation = event.generation
            case ev.RunFinished() | ev.RunFailed():
                over = True
    assert over == (world.exit_code is not None)


@settings(max_examples=50, deadline=None)
@given(st.lists(MOVES, max_size=15))
def test_from_anywhere_a_run_can_be_finished(moves: list[tuple[Any, ...]]) -> None:
    """No order of events leaves a run stuck: with fresh nodes that do their part it ends well, unless it failed by name."""
    world = World(fresh_state(cluster={"nodes": 2, "stages": 2}, train={"steps": 5}))
    world.join("a", "b")
    for move in moves:
        play(world, move)
    for node in list(world.state.sessions):
        world.lose(node)
    if world.exit_code is not None:
        return
    world.join("x", "y")
    world.wait(2 * LEASE, beating=["x", "y"])
    world.settle()
    world.finish_run()
    assert world.exit_code == 0
