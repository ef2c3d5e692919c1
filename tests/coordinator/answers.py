"""How a node answers the coordinator: what scripted worlds, fake nodes and the crowds of the benchmarks share.

These nodes have no model. They answer at once, hold any state that they are asked for, and report a loss that falls with the
steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from dtfm.protos import control_pb2 as wire
from dtfm.protos.bucket_layout import layout_digest
from dtfm.scheduler.formats.plan import unpack_plan
from dtfm.scheduler.model.plan import Plan, Stage

DIGEST = b"state at some step".ljust(32)
FILE_DIGEST = bytes(32)


def answer(
    node: str, message: wire.CoordinatorMessage, assignment: wire.Assignment, micro_batch: int = 2
) -> wire.NodeMessage | None:
    """What ``node`` says to ``message`` under the ``assignment`` that it got last. None: nothing, or something that the caller
    has to make up (measured links, a snapshot's files, the held-out loss)."""
    match message.WhichOneof("message"):
        case "assignment" if states := states_of(unpack_plan(message.assignment.plan), node):
            generation = message.assignment.generation
            return wire.NodeMessage(plan_ready=wire.PlanReady(generation=generation, states=states))
        case "standby" if message.standby.past_last_layer:
            caught_up = wire.StandbyProgress(number=message.standby.number, step=assignment.step)
            return wire.NodeMessage(standby_progress=caught_up)
        case "begin":
            return wire.NodeMessage(
                step_ready=vote(unpack_plan(assignment.plan), node, message.begin.step, micro_batch)
            )
        case "commit" if message.commit.pause:
            commit = message.commit
            applied = wire.Applied(generation=commit.generation, step=commit.step, state_digest=DIGEST)
            return wire.NodeMessage(applied=applied)
        case "commit":
            return wire.NodeMessage(
                step_ready=vote(unpack_plan(assignment.plan), node, message.commit.step + 1, micro_batch)
            )
        case "test":
            return wire.NodeMessage(timed=wire.Timed(flops=1e11))
        case "reach":
            return reached(*(peer.node for peer in message.reach.peers))
        case _:
            return None


def states_of(plan: Plan, node: str, digest: bytes = DIGEST, donors: Iterable[str] = ()) -> list[wire.BucketState]:
    """The node's reports about the buckets of its stage. ``donors``: the nodes that it has them from."""
    stages = [stage for stage in plan.stages if node in stage.replicas]
    layers = [layer for stage in stages for layer in range(*stage.layers)]
    return [wire.BucketState(bucket=layer, digest=digest, donors=donors) for layer in layers]


def links(node: str, peers: Iterable[str]) -> wire.NodeMessage:
    """The links to and from ``peers``: 1 ms, 1 GB/s."""
    both = [pair for peer in peers for pair in ((node, peer), (peer, node))]
    measured = [wire.LinkReport.Link(source=a, destination=b, latency_seconds=0.001, bandwidth=1e9) for a, b in both]
    return wire.NodeMessage(links=wire.LinkReport(links=measured))


def reached(*nodes: str, way: str = "", problem: str = "") -> wire.NodeMessage:
    """The results of dialling the nodes."""
    outcomes = [wire.Reached.Outcome(node=node, way=way, problem=problem) for node in nodes]
    return wire.NodeMessage(reached=wire.Reached(outcomes=outcomes))


def vote(plan: Plan, node: str, step: int, micro_batch: int = 2) -> wire.StepReady:
    """The vote for ``step``; on the last stage of an island, with the loss of the node's micro-batches."""
    ends = {stage.island: stage for stage in plan.stages}.values()
    loads = {name: load for last in ends for name, load in zip(last.replicas, last.loads, strict=True)}
    samples = micro_batch * loads.get(node, 0)
    return wire.StepReady(
        generation=plan.generation,
        step=step,
        squared_gradient_norm=2.0,
        loss_sum=samples / step,
        samples=samples,
        state_digest=DIGEST,
    )


def evaluated(generation: int, step: int, losses: Iterable[float] = (2.0,) * 4) -> wire.NodeMessage:
    """The held-out losses, by default of 4 micro-batches."""
    return wire.NodeMessage(evaluated=wire.Evaluated(generation=generation, step=step, losses=losses))


def buckets_of(plan: Plan, node: str) -> Sequence[int]:
    """The buckets that ``node`` trains, and writes into a snapshot."""
    stage = stage_of(plan, node)
    return range(*stage.layers) if stage is not None else ()


def bucket_content(bucket: int) -> bytes:
    """The file of a bucket with one weight of one element, without moments."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({f"layer.{bucket}": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


def bucket_layout(bucket: int) -> bytes:
    return 2 * layout_digest(bucket_content(bucket)[8:-4], 4)


def nonce(digest: bytes) -> str:
    """Of a file with this digest."""
    return digest.hex()[:32].ljust(32, "0")


def stored(step: int, files: Mapping[int, tuple[int, bytes]], problem: str = "") -> wire.NodeMessage:
    """``files``: by bucket, the size in bytes and the digest."""
    parts = [wire.Part(bucket=bucket, size_bytes=size, digest=digest) for bucket, (size, digest) in files.items()]
    return wire.NodeMessage(moved=wire.Moved(step=step, parts=parts, problem=problem))


def uploaded(
    step: int, files: Mapping[int, tuple[int, bytes]], problem: str = "", *, moments: bytes = b""
) -> wire.NodeMessage:
    """``files``: by bucket, the size in bytes and the digest. ``moments``: of files with the weights alone."""
    parts = [
        wire.Part(bucket=bucket, size_bytes=size, digest=digest, nonce=nonce(digest), moments=moments)
        for bucket, (size, digest) in files.items()
    ]
    return wire.NodeMessage(moved=wire.Moved(step=step, parts=parts, problem=problem, in_checkpoint=True))


def last_busy(plan: Plan) -> str:
    """A node of the last stage that has micro-batches."""
    last = plan.stages[-1]
    return next(node for node, load in zip(last.replicas, last.loads, strict=True) if load)


def stage_of(plan: Plan, node: str) -> Stage | None:
    return next((stage for stage in plan.stages if node in stage.replicas), None)
