"""Random moves of a scripted world, for rules that hold in any order of events."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.copies.snapshot import PAUSE_LEASES
from dtfm.coordinator.core.phases import Pausing, Stepping, Switching
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import DIGEST, FILE_DIGEST, links, stored, uploaded
from tests.coordinator.script import BUCKETS, LEASE, World, prepared

NODES = st.sampled_from(["a", "b", "c", "d"])
FLOATS = st.sampled_from([2.0, 2.0, 1.0, -1.0, math.nan, math.inf])
OFFSETS = st.sampled_from([0, 0, 0, 1, -1])

Maker = Callable[[int, int], wire.NodeMessage]
"""Makes a message about this generation and step, mostly the current ones, sometimes past or future ones."""


def vote(loss: float, samples: int) -> Maker:
    return lambda g, s: wire.NodeMessage(
        step_ready=wire.StepReady(
            generation=g, step=s, squared_gradient_norm=2.0, loss_sum=loss, samples=samples, state_digest=DIGEST
        )
    )


def part(number: int) -> Maker:
    return lambda _, s: stored(max(0, s - 1), {number: (1, FILE_DIGEST)})


def sent(number: int, problem: str) -> Maker:
    return lambda _, s: uploaded(max(0, s - 1), {number: (1, FILE_DIGEST)}, problem)


MAKERS: st.SearchStrategy[Maker] = st.one_of(
    st.builds(vote, FLOATS, st.sampled_from([0, 8])),
    st.builds(part, st.integers(0, 5)),
    st.builds(sent, st.integers(0, 5), st.sampled_from(["", "no room"])),
    st.sampled_from(
        [
            lambda g, _: wire.NodeMessage(plan_ready=wire.PlanReady(generation=g)),
            lambda g, _: wire.NodeMessage(plan_failed=wire.PlanFailed(generation=g, problem="x")),
            lambda g, _: wire.NodeMessage(plan_failed=wire.PlanFailed(generation=g, problem="x", lost=[0])),
            lambda g, s: wire.NodeMessage(
                step_failed=wire.StepFailed(generation=g, step=s, problem=wire.PEER_LOST, peer="b")
            ),
            lambda g, s: wire.NodeMessage(step_failed=wire.StepFailed(generation=g, step=s, problem=wire.INTERNAL)),
            lambda _g, s: wire.NodeMessage(
                audited=wire.Audited(number=s, activations=1.0, gradients=-1.0, addends=2.0)
            ),
            lambda _g, s: wire.NodeMessage(audited=wire.Audited(number=s, withheld_by="a")),
            lambda g, s: wire.NodeMessage(evaluated=wire.Evaluated(generation=g, step=max(0, s - 1), losses=[1.0] * 4)),
            lambda g, s: wire.NodeMessage(applied=wire.Applied(generation=g, step=max(0, s - 1), state_digest=DIGEST)),
            lambda _g, s: wire.NodeMessage(texts=wire.Texts(step=max(0, s - 1), texts=[wire.Texts.Text(text="x")])),
            lambda _g, _s: wire.NodeMessage(goodbye=wire.Goodbye(reason="x")),
            lambda _g, _s: wire.NodeMessage(leaving=wire.Leaving(reason="x")),
            lambda _g, _s: wire.NodeMessage(),
            lambda _g, _s: prepared(),
            lambda _g, _s: links("a", ["b", "c"]),
        ]
    ),
)

MOVES = st.one_of(
    *[st.just(("advance",))] * 6,
    st.tuples(st.just("join"), NODES),
    st.tuples(st.just("lose"), NODES),
    *[st.tuples(st.just("hear"), NODES, MAKERS, OFFSETS, OFFSETS)] * 2,
    st.tuples(st.sampled_from(["evaluate", "save", "apply", "report_files", "plan_now"])),
    st.tuples(st.just("wait"), st.sampled_from([1.0, LEASE * 1.1, LEASE * PAUSE_LEASES, LEASE * 120])),
)


def play(world: World, move: tuple[Any, ...]) -> None:
    """Makes the move, if it is possible now."""
    name, *rest = move
    ledger = world.state.ledger
    match name:
        case "join":
            world.join(rest[0])
        case "lose" if rest[0] in world.streams:
            world.lose(rest[0])
        case "hear" if rest[0] in world.streams:
            node, make, generation, step = rest
            world.hear(
                node, make(max(0, ledger.training.generation + generation), max(0, ledger.training.step + 1 + step))
            )
        case "wait":
            world.wait(rest[0], beating=list(world.state.members.sessions)[:2])
        case "plan_now":
            world.feed(t.Asked(1, wire.PlanNowRequest(), "operator", 0.0))
        case "advance" if isinstance(world.state.phase, Switching):
            world.settle()
        case "advance" if isinstance(world.state.phase, Stepping):
            world.step()
        case "advance" | "apply" if isinstance(world.state.phase, Pausing):
            world.apply()
        case "evaluate" if ledger.training.plan is not None:
            world.evaluate()
        case "report_files" if (snapshot := world.state.safekeeping.snapshot) is not None:
            for node in sorted(world.state.members.sessions):
                mine = snapshot.moves.of(node) or range(BUCKETS)
                world.hear(node, stored(snapshot.step, dict.fromkeys(mine, (1, FILE_DIGEST))))
        case "save" if ledger.training.plan is not None:
            world.write_checkpoint()
            if world.manifests:
                world.feed(t.ManifestDone(world.manifests.pop().step, ""))
