"""Reductions of several members in one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import torch

from dtfm.kernels.codec import Codec, Encoded
from dtfm.node.host.cuda_streams import Beside
from dtfm.node.model.placement import Group, Placement, placement_of
from dtfm.node.training.reduction.reducer import Final, Reducer, Residuals
from dtfm.node.transport.receiver import Arrival
from dtfm.node.transport.sender import What
from dtfm.protos.frame import Header
from dtfm.scheduler.model.plan import Plan, Stage

STEP = 4


def group(*nodes: str, islands: tuple[int, ...] = ()) -> Group:
    """All in one stage, each with a micro-batch, and by default an island of its own."""
    return Group(nodes, nodes, (0,) * len(nodes), (1,) * len(nodes), islands or tuple(range(len(nodes))))


def placed(node: str, groups: dict[int, Group]) -> Placement:
    """A placement that has these groups."""
    placement = placement_of(Plan(1, (Stage((0, 1), (node,), (1,)),), ()), node, 0)
    assert placement is not None
    return replace(placement, groups=groups)


def reduce_together(
    gradients: dict[str, dict[int, torch.Tensor]],
    groups: dict[int, Group],
    codec: Codec = Codec.OFF,
    carried: dict[str, Residuals] | None = None,
    before: Callable[[str], Beside] = lambda _: nullcontext,
    sends: Callable[[Header, memoryview], None] = lambda *_: None,
) -> dict[str, Residuals]:
    """Runs every member's reduction in a thread; what one sends is in the other's queue at once. ``sends`` is called with each
    message. Returns the residuals."""
    reducers: dict[str, Reducer] = {}

    def sender(node: str) -> Callable[[str, What, Future[Encoded]], None]:
        def send(to: str, what: What, encoded: Future[Encoded]) -> None:
            made, data = what.header(encoded.result()), memoryview(bytearray(encoded.result().data))
            sends(made, data)
            reducers[to].queue.put(STEP, Arrival(node, made, data))

        return send

    for node, mine in gradients.items():
        placement = placed(node, {b: groups[b] for b in mine})
        earlier = carried.get(node) if carried is not None else None
        reducers[node] = Reducer(placement, sender(node), carried=earlier)

    def run(node: str) -> Residuals:
        reducer = reducers[node]
        for bucket in gradients[node]:
            reducer.queue.put(STEP, Final(bucket, before(node)))
        reducer.reduce(STEP, gradients[node], codec, lambda *_: None)
        reducer.close()
        return reducer.left_out

    with ThreadPoolExecutor(len(gradients)) as pool:
        running = {node: pool.submit(run, node) for node in gradients}
        return {node: done.result(timeout=120) for node, done in running.items()}
